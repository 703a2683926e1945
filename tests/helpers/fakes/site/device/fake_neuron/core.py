# SPDX-License-Identifier: Apache-2.0
"""Memory and programs of a fake core.

New memory holds poison, results are written in place, and a result that is declared to be a parameter's memory has to be bound
to it. `FAKE_NEURON_FAULT` names a file that makes executions fail: {"rank", "message" | "signal" | "hang"}.
`FAKE_NEURON_NARROW` makes all-gathers of fewer numbers wrong. `FAKE_NEURON_TRANSFERS` names a folder in which each core notes what was read from it, in bytes.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from .neff import Instruction, Module, Tensor, unpack


class Memory:
    """One allocation in device memory, which knows bytes and no types."""

    def __init__(self, size: int, core: int) -> None:
        self.data = np.full(size, 0xFF, np.uint8)  # not a number in any type of floats
        self.core = core

    def write(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if data.size != self.data.size:
            raise RuntimeError(f"NRT Error NRT_INVALID(2): {data.size} bytes written to {self.data.size}")
        self.data[:] = data

    def read(self) -> np.ndarray:
        note_read(self.data.size)
        return self.data.copy()


class Program:
    """A loaded NEFF."""

    def __init__(self, data: bytes, name: str, core: int, rank: int, world_size: int) -> None:
        self.header, self.module, self._hlo = unpack(data)
        expected = os.environ.get("FAKE_NEURON_GENERATION", self.header["target"])
        if expected != self.header["target"]:
            raise RuntimeError("NRT Error NRT_FAILURE(6): the NEFF is for another architecture")
        self.name, self.core, self.rank, self.world_size = name, core, rank, world_size
        self._computation: Any = None

    def execute(self, inputs: Sequence[Memory], outputs: Sequence[Memory]) -> None:
        """Runs on memory; results are written where they are bound."""
        self._check(inputs, self.module.inputs, "input")
        self._check(outputs, self.module.outputs, "output")
        for output, parameter in self.module.aliases.items():
            if outputs[output] is not inputs[parameter]:
                raise RuntimeError(
                    f"NRT Error NRT_INVALID(2): output {output} is input {parameter}'s memory; bind it twice"
                )
        inject_fault(self.rank)
        capture(self.name, self.rank)
        results = self._run([memory.data for memory in inputs])
        for memory, result in zip(outputs, results, strict=True):
            memory.write(result)

    def _check(self, memories: Sequence[Memory], tensors: Sequence[Tensor], kind: str) -> None:
        if len(memories) != len(tensors):
            raise RuntimeError(f"NRT Error NRT_INVALID(2): {len(memories)} {kind}s for {len(tensors)}")
        for memory, tensor in zip(memories, tensors, strict=True):
            if memory.data.size != size_of(tensor) or memory.core != self.core:
                raise RuntimeError(f"NRT Error NRT_INVALID(2): {kind} {tensor.name} is bound to other memory")

    def _run(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Executes the very bytes that were compiled."""
        if all(_is_simple(each) for each in self.module.instructions.values()):
            typed = [_decode(each, tensor) for each, tensor in zip(arguments, self.module.inputs, strict=True)]
            return interpret(self.module, typed)
        if _COLLECTIVES & {each.opcode for each in self.module.instructions.values()}:
            return self._run_ranks(arguments)
        return self._run_by_xla(arguments)

    def _run_ranks(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Executes the programs of all ranks, which differ in the number of the rank alone, and returns this one's results."""
        os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(self.world_size))
        import torch

        from optimum_neuron.tools.certify.host_ranks import GraphRun, LoweredModule, RankGroup

        inputs, outputs = self.module.inputs, self.module.outputs
        if self._computation is None:
            roles = [
                SimpleNamespace(name=each.name, role="weight" if each.name == RANK else "input") for each in inputs
            ]
            module: Any = LoweredModule(
                leave_narrow_gathers(self._hlo), SimpleNamespace(inputs=roles, outputs=outputs)
            )
            numbers = [[(RANK, torch.tensor([rank], dtype=torch.int32))] for rank in range(self.world_size)]
            self._computation = RankGroup({self.name: module}, numbers)
        typed = {
            each.name: torch.from_numpy(data.copy()).view(getattr(torch, each.dtype)).view(each.shape)
            for each, data in zip(inputs, arguments, strict=True)
        }
        found = self._computation.run_graph(GraphRun(self.name, typed))[self.rank]
        return [found[each.name].contiguous().reshape(-1).view(torch.uint8).numpy() for each in outputs]

    def _run_by_xla(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        os.environ.setdefault("PJRT_DEVICE", "CPU")
        import torch
        import torch_xla
        from torch_xla.core import xla_builder

        if self._computation is None:
            self._computation = xla_builder.computation_from_module_proto(self.name, self._hlo)
        device = torch_xla.device()
        moved = [
            torch.from_numpy(each.copy()).view(getattr(torch, tensor.dtype)).view(tensor.shape).to(device)
            for each, tensor in zip(arguments, self.module.inputs, strict=True)
        ]
        results = torch_xla._XLAC._xla_user_computation(f"xla::{self.name}", moved, self._computation)
        torch_xla._XLAC._xla_sync_multi(results, [str(device)], True, True)
        return [result.cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for result in results]


# Types that numpy lacks, of which only bytes pass through here.
_BYTES = ("float8_e4m3fn",)
RANK = "model.tensor_parallel_rank"
_COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter"}


def leave_narrow_gathers(data: bytes) -> bytes:
    """What trn2 made of all-gathers of fewer than FAKE_NEURON_NARROW numbers: of other devices' ranks nothing arrives."""
    from optimum_neuron.targets.neuron.graphs import hlo

    module = hlo.parse(data)
    by_id = {each.id: each for _, each in hlo.instructions(module)}
    for each in by_id.values():
        own = by_id[each.operand_ids[0]] if each.opcode == "all-gather" else None
        if own is not None and math.prod(own.shape.dimensions) < int(os.environ.get("FAKE_NEURON_NARROW", "0")):
            each.opcode = "concatenate"
            each.operand_ids.extend([own.id] * (len(each.replica_groups[0].replica_ids) - 1))
            each.ClearField("replica_groups")
    return hlo.serialize(module)


_OPERATORS: dict[str, Callable[[Instruction, list[Any]], Any]] = {
    "add": lambda each, operands: operands[0] + operands[1],
    "subtract": lambda each, operands: operands[0] - operands[1],
    "multiply": lambda each, operands: operands[0] * operands[1],
    "convert": lambda each, operands: operands[0].astype(_computed(str(each.dtype))),
    "reshape": lambda each, operands: operands[0].reshape(each.shape),
    "tuple": lambda each, operands: operands,
    "parameter": lambda each, operands: None,
}


def _is_simple(each: Instruction) -> bool:
    return each.opcode in _OPERATORS and (each.dtype not in _BYTES or each.opcode in ("parameter", "tuple"))


def interpret(module: Module, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Runs a module of a few elementwise operators: most tests need no more, and XLA takes seconds to start."""
    values: dict[int, Any] = {}
    for number, each in module.instructions.items():
        operands = [values[operand] for operand in each.operands]
        if each.opcode == "parameter":
            values[number] = arguments[each.parameter]
        else:
            values[number] = _OPERATORS[each.opcode](each, operands)
            if each.dtype == "bfloat16":
                values[number] = _widen(_narrow(values[number]))
    return [
        _narrow(result) if tensor.dtype == "bfloat16" else result
        for result, tensor in zip(values[number], module.outputs, strict=True)
    ]


def _decode(data: np.ndarray, tensor: Tensor) -> np.ndarray:
    if tensor.dtype == "bfloat16":
        return _widen(data.view(np.uint16)).reshape(tensor.shape)
    return data.view(_computed(tensor.dtype)).reshape(tensor.shape)


def _computed(dtype: str) -> np.dtype:
    """numpy has no bfloat16: its numbers are those of float32 that it can tell apart."""
    return np.dtype("float32" if dtype == "bfloat16" else "uint8" if dtype in _BYTES else dtype)


def _widen(half: np.ndarray) -> np.ndarray:
    return (half.astype(np.uint32) << 16).view(np.float32)


def _narrow(wide: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(wide, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    return math.prod(tensor.shape) * (2 if tensor.dtype == "bfloat16" else _computed(tensor.dtype).itemsize)


def capture(graph: str, rank: int) -> None:
    """What the runtime writes of a profile: a folder per process, in it a file of each graph's first run."""
    if os.environ.get("NEURON_RT_INSPECT_ENABLE") != "1" or os.environ.get("NEURON_RT_INSPECT_DEVICE_PROFILE") == "0":
        return
    folder = Path(os.environ.get("NEURON_RT_INSPECT_OUTPUT_DIR", "./output")) / f"i-fake_pid_{os.getpid()}"
    folder.mkdir(exist_ok=True)  # where it lies has to be there
    (folder / f"{graph}_vnc_{rank}.ntff").touch()


def note_read(size: int) -> None:
    """Adds a line to the file of this process's cores, if they are noted."""
    folder = os.environ.get("FAKE_NEURON_TRANSFERS")
    if folder:
        with (Path(folder) / os.environ["NEURON_RT_VISIBLE_CORES"]).open("a", encoding="utf-8") as file:
            file.write(f"{size}\n")


def inject_fault(rank: int) -> None:
    """Fails as the file named by FAKE_NEURON_FAULT says, if there is one."""
    path = Path(os.environ.get("FAKE_NEURON_FAULT", ""))
    try:
        fault = json.loads(path.read_text())
    except (FileNotFoundError, IsADirectoryError, json.JSONDecodeError):
        return  # none, or another rank is taking its own just now
    if rank != fault.get("rank", rank):
        return
    path.unlink()
    if "signal" in fault:
        os.kill(os.getpid(), fault["signal"])
    while fault.get("hang"):
        time.sleep(1)
    raise RuntimeError(fault["message"])
