# SPDX-License-Identifier: Apache-2.0
"""Execution of lowered graphs on this machine's CPU: XLA runs the very bytes that the Neuron compiler gets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from ....arrays import to_numpy, to_torch
from ....step.spec import LOGITS
from ..graphs import hlo
from ..graphs.io import GraphIO, read_hlo
from ..lowering.kernel_calls import by_reference
from .ahead import AheadExecutable, find_draws, idle_inputs


class HloProgram:
    """A graph with the parameters and results of its GraphIO, in order."""

    def __init__(self, path: Path, io: GraphIO) -> None:
        """Load a graph; raise ValueError, which names the file, where it is not the one that `io` describes."""
        os.environ.setdefault("PJRT_DEVICE", "CPU")
        import torch_xla
        from torch_xla.core import xla_builder

        data = read_hlo(path)
        module = hlo.parse(data)
        parameters = [(each.name, *hlo.array(each.shape)) for each in hlo.parameters(module)]
        results = [hlo.array(shape) for shape in hlo.results(module)]
        if parameters != [(each.name, each.shape, each.dtype) for each in io.inputs] or results != [
            (each.shape, each.dtype) for each in io.outputs
        ]:
            raise ValueError(f"{path} has other parameters or results than its description; export the model again")
        self.io = io
        self.device = torch_xla.device()
        self._target = f"xla::{path.stem}"
        self._computation = xla_builder.computation_from_module_proto(path.stem, by_reference(data))

    def run_program(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return all results from all parameters: tensors on `device`, computed when the call returns."""
        import torch_xla

        results: list[Tensor] = torch_xla._XLAC._xla_user_computation(self._target, list(inputs), self._computation)
        torch_xla._XLAC._xla_sync_multi(results, [str(self.device)], True, True)
        return results


class HloExecutable(AheadExecutable):
    """Lowered graphs that share weights and KV state, all on XLA's CPU device.

    XLA gives every result memory of its own, so a state is replaced by its new value after each run. `start` computes a step at once, and
    results that nothing reads stay on XLA's device, as on a device that runs ahead.
    """

    def __init__(
        self,
        programs: Mapping[str, HloProgram],
        calls: Mapping[str, Sequence[str]],
        weights: Mapping[str, np.ndarray],
        states: Mapping[str, np.ndarray],
    ) -> None:
        """Bind programs to weights and states.

        Args:
            calls: the names of a step's inputs, in order; a graph that is left out takes those that it uses.
        """
        super().__init__(programs)
        self._programs = programs
        device = next(iter(programs.values())).device
        needed = {name for program in programs.values() for name in program.io.names("weight")}
        self._device = device
        self._weights = {name: to_torch(weights[name]).to(device) for name in needed}
        self._states = {name: to_torch(state).to(device) for name, state in states.items()}
        self._calls = {name: program.io.names("input") for name, program in programs.items()} | dict(calls)
        described = {name: program.io for name, program in programs.items()}
        self._draws, self._idle = find_draws(calls, described), idle_inputs(described, calls)

    def start(
        self, graph: str, inputs: Sequence[np.ndarray], *, logits: bool
    ) -> Callable[[], Sequence[np.ndarray | None]]:
        outputs = self._run_graph(graph, inputs)
        for draw in self._draws.get(graph, ()):
            if draw.is_due(inputs):
                (outputs[draw.tokens],) = self._run_graph(draw.graph, draw.take_inputs(inputs))
        names = [each.name for each in self._programs[graph].io.outputs if each.alias_of is None]
        wanted = [logits or not name.endswith(LOGITS) for name in names]
        return lambda: [_to_host(each) if is_wanted else None for each, is_wanted in zip(outputs, wanted, strict=True)]

    def _run_graph(self, graph: str, inputs: Sequence[np.ndarray]) -> list[Tensor]:
        program, given = self._programs[graph], dict(zip(self._calls[graph], inputs, strict=True))
        bound = self._weights | self._states
        arguments = [
            to_torch(given[binding.name]).to(self._device) if binding.role == "input" else bound[binding.name]
            for binding in program.io.inputs
        ]
        outputs = []
        for output, result in zip(program.io.outputs, program.run_program(arguments), strict=True):
            if output.alias_of is None:
                outputs.append(result)
            else:
                self._states[output.alias_of] = result
        return outputs

    def idle_inputs(self) -> Mapping[str, Sequence[np.ndarray]]:
        return self._idle

    def read_state(self, name: str) -> np.ndarray:
        return to_numpy(self._states[name].cpu())

    def write_state(self, name: str, array: np.ndarray) -> None:
        self._states[name] = to_torch(array).to(self._device)


def _to_host(result: Tensor) -> np.ndarray:
    return to_numpy(result.cpu())
