# SPDX-License-Identifier: Apache-2.0
"""Memory and programs of a fake core.

New memory holds poison, results are written in place, and a result that is declared to be a parameter's memory has to be bound
to it. `FAKE_NEURON_FAULT` names a file that makes executions fail: {"graph", "rank", "message" | "signal" | "hang", "times"}.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import wire
from .neff import unpack


class Memory:
    """One allocation in device memory."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, core: int) -> None:
        poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
        self.data = torch.full(tuple(shape), poison, dtype=dtype)
        self.core = core
        self.freed = False

    def check(self) -> None:
        if self.freed:
            raise RuntimeError("NRT Error NRT_INVALID_HANDLE(3): tensor was freed")

    def write(self, tensor: torch.Tensor) -> None:
        self.check()
        if tensor.shape != self.data.shape or tensor.dtype != self.data.dtype:
            raise RuntimeError(
                f"NRT Error NRT_INVALID(2): {tensor.dtype} {list(tensor.shape)} written to {self.data.dtype} "
                f"{list(self.data.shape)}"
            )
        self.data.copy_(tensor)

    def read(self) -> torch.Tensor:
        self.check()
        return self.data.clone()

    def free(self) -> None:
        self.freed = True


class Program:
    """A loaded NEFF."""

    def __init__(self, data: bytes, name: str, core: int, rank: int, world_size: int) -> None:
        self.header, hlo = unpack(data)
        expected = os.environ.get("FAKE_NEURON_GENERATION", self.header["target"])
        if expected != self.header["target"]:
            raise RuntimeError("NRT Error NRT_FAILURE(6): the NEFF is for another architecture")
        self.module = wire.read_module(hlo)
        self.name, self.core, self.rank, self.world_size = name, core, rank, world_size
        self._hlo = hlo
        self._computation = None

    def execute(self, inputs: Sequence[Memory], outputs: Sequence[Memory]) -> None:
        """Runs on memory; results are written where they are bound."""
        self._check(inputs, self.module.inputs, "input")
        self._check(outputs, self.module.outputs, "output")
        for output, parameter in self.module.aliases.items():
            if outputs[output] is not inputs[parameter]:
                raise RuntimeError(
                    f"NRT Error NRT_INVALID(2): output {output} is input {parameter}'s memory; bind it twice"
                )
        inject_fault(self.name, self.rank)
        results = self._run([memory.data for memory in inputs])
        for memory, result in zip(outputs, results, strict=True):
            memory.data.copy_(result.view(memory.data.dtype).view(memory.data.shape))

    def _check(self, memories: Sequence[Memory], tensors: Sequence[wire.Tensor], kind: str) -> None:
        if len(memories) != len(tensors):
            raise RuntimeError(f"NRT Error NRT_INVALID(2): {len(memories)} {kind}s for {len(tensors)}")
        for memory, tensor in zip(memories, tensors, strict=True):
            memory.check()
            if memory.data.numel() * memory.data.itemsize != _bytes(tensor) or memory.core != self.core:
                raise RuntimeError(f"NRT Error NRT_INVALID(2): {kind} {tensor.name} is bound to other memory")

    def _run(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Executes the very bytes that were compiled."""
        typed = [_as(argument, tensor) for argument, tensor in zip(arguments, self.module.inputs, strict=True)]
        if all(each.opcode in _OPERATORS for each in self.module.instructions.values()):
            return interpret(self.module, typed)
        return self._run_by_xla(typed)

    def _run_by_xla(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        os.environ.setdefault("PJRT_DEVICE", "CPU")
        import torch_xla
        from torch_xla.core import xla_builder

        if self._computation is None:
            self._computation = xla_builder.computation_from_module_proto(self.name, self._hlo)
        device = torch_xla.device()
        moved = [argument.clone().to(device) for argument in arguments]
        results = torch_xla._XLAC._xla_user_computation(f"xla::{self.name}", moved, self._computation)
        torch_xla._XLAC._xla_sync_multi(results, [str(device)], True, True)
        return [result.cpu() for result in results]


_OPERATORS: dict[str, Callable[[wire.Instruction, list[Any]], Any]] = {
    "add": lambda each, operands: operands[0] + operands[1],
    "subtract": lambda each, operands: operands[0] - operands[1],
    "multiply": lambda each, operands: operands[0] * operands[1],
    "convert": lambda each, operands: operands[0].to(getattr(torch, str(each.dtype))),
    "reshape": lambda each, operands: operands[0].reshape(each.shape),
    "tuple": lambda each, operands: operands,
    "parameter": lambda each, operands: None,
}


def interpret(module: wire.Module, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Runs a module of a few elementwise operators: most tests need no more, and XLA takes seconds to start."""
    values: dict[int, Any] = {}
    for number, each in module.instructions.items():
        operands = [values[operand] for operand in each.operands]
        values[number] = (
            arguments[each.parameter] if each.opcode == "parameter" else _OPERATORS[each.opcode](each, operands)
        )
    return [result.clone() for result in values[number]]


def _as(tensor: torch.Tensor, wanted: wire.Tensor) -> torch.Tensor:
    return tensor.view(getattr(torch, wanted.dtype)).view(wanted.shape)


def _bytes(tensor: wire.Tensor) -> int:
    return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta").nbytes


def inject_fault(graph: str, rank: int) -> None:
    """Fails as the file named by FAKE_NEURON_FAULT says, if there is one."""
    path = Path(os.environ.get("FAKE_NEURON_FAULT", ""))
    try:
        fault = json.loads(path.read_text())
    except (FileNotFoundError, IsADirectoryError, json.JSONDecodeError):
        return  # none, or another rank is taking its own just now
    if graph != fault.get("graph", graph) or rank != fault.get("rank", rank):
        return
    if fault.get("times", 1) <= 1:
        path.unlink()
    else:
        path.write_text(json.dumps({**fault, "times": fault["times"] - 1}))
    if "signal" in fault:
        os.kill(os.getpid(), fault["signal"])
    while fault.get("hang"):
        time.sleep(1)
    raise RuntimeError(fault["message"])
