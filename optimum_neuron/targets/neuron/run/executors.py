# SPDX-License-Identifier: Apache-2.0
"""Executables of lowered graphs: each step is started, then read, and graphs of their own sample and copy.

One of them runs on this machine's CPU: XLA executes the very bytes that the Neuron compiler gets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from torch import Tensor

from ....arrays import to_numpy, to_torch
from ....step.sampling.sampler import TEMPERATURE
from ....step.spec import DECODE, LOGITS, SAMPLING_PARAMS, UNIFORMS
from ... import Executable
from ..graphs import hlo
from ..graphs.io import COPY_SLOT, KEEP_STATE, RESTORE_STATE, SAMPLERS, GraphIO, read_hlo
from ..graphs.state_graphs import slots_input


# Row inputs of a sampler that choose no slot; a copy of nothing is zeros.
_NO_SLOT = dict.fromkeys(map(slots_input, SAMPLERS), -1)


@dataclass(frozen=True)
class Draw:
    """A graph that draws a group's tokens after a step; `tokens` is the number of the step's output that they replace."""

    graph: str
    group: str
    tokens: int

    def find_inputs(self, given: Mapping[str, np.ndarray]) -> list[np.ndarray] | None:
        """Return the sampler's inputs from those of a step by name; None where all rows in use keep the largest, which the step has chosen."""
        params, positions = given[f"{self.group}.{SAMPLING_PARAMS}"], given[f"{self.group}.position_ids"][:, 0]
        in_use = positions >= 0
        if not (in_use & (params[:, TEMPERATURE] > 0)).any():
            return None
        slots = np.arange(len(positions), dtype=np.int32) if self.group == DECODE else given[f"{self.group}.seq_ids"]
        return [params, given[f"{self.group}.{UNIFORMS}"], np.where(in_use, slots, np.int32(-1))]


def returned_names(io: GraphIO) -> list[str]:
    """Return the outputs of a graph that are no states, in order."""
    return [each.name for each in io.outputs if each.alias_of is None]


class AheadExecutable(Executable):
    """The part of an executable that follows from `start`; `calls` names the inputs of those graphs that are steps, in order."""

    runs_ahead = True

    def __init__(self, graphs: Mapping[str, GraphIO], calls: Mapping[str, Sequence[str]]) -> None:
        self._described, self._calls = graphs, calls
        self._draws = {
            name: [
                Draw(graph, group, returned_names(graphs[name]).index(f"{group}.tokens"))
                for group, graph in SAMPLERS.items()
                if f"{group}.{SAMPLING_PARAMS}" in call
            ]
            for name, call in calls.items()
        }

    def run(self, graph: str, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return cast(Sequence[np.ndarray], self.start(graph, inputs, logits=True)())

    def find_due(self, graph: str, inputs: Sequence[np.ndarray]) -> list[tuple[Draw, list[np.ndarray]]]:
        """Return the draws that follow a step, each with its sampler's inputs."""
        draws = self._draws.get(graph)
        given = dict(zip(self._calls[graph], inputs, strict=True)) if draws else {}
        found = ((draw, draw.find_inputs(given)) for draw in draws or ())
        return [(draw, taken) for draw, taken in found if taken is not None]

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        self._run_copy(COPY_SLOT, source, destination, length)

    def keep_state(self, slot: int, place: int) -> None:
        self._run_copy(KEEP_STATE, slot, place, 1)

    def restore_state(self, place: int, slot: int) -> None:
        self._run_copy(RESTORE_STATE, place, slot, 1)

    def _run_copy(self, graph: str, source: int, destination: int, length: int) -> None:
        if graph in self._described:
            numbers = source, destination, length  # in the order of COPY_INPUTS
            self.run(graph, [np.array([each], np.int32) for each in numbers])

    def idle_inputs(self) -> Mapping[str, Sequence[np.ndarray]]:
        return {
            name: [
                np.full(each.shape, _NO_SLOT.get(each.name, 0), each.dtype)
                for each in io.inputs
                if each.role == "input"
            ]
            for name, io in self._described.items()
            if name not in self._calls
        }


class HloProgram:
    """A graph with the parameters and results of its GraphIO, in order."""

    def __init__(self, path: Path, io: GraphIO) -> None:
        """Load a graph; raise ValueError, which names the file, where it is not the one that `io` describes."""
        os.environ.setdefault("PJRT_DEVICE", "CPU")
        import torch_xla
        from torch_xla.core import xla_builder

        from ..lowering.kernel_calls import by_reference

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
    """Lowered graphs that share weights and KV state, all on XLA's CPU device, where results stay that nothing reads.

    XLA gives every result memory of its own, so a state is replaced by its new value after each run. `start` computes a step at once.
    """

    def __init__(
        self,
        programs: Mapping[str, HloProgram],
        calls: Mapping[str, Sequence[str]],
        weights: Mapping[str, np.ndarray],
        states: Mapping[str, np.ndarray],
    ) -> None:
        """Bind programs to weights and states; `calls` as for `AheadExecutable`."""
        super().__init__({name: program.io for name, program in programs.items()}, calls)
        self._programs = programs
        self._device = next(iter(programs.values())).device
        needed = {name for io in self._described.values() for name in io.names("weight")}
        self._weights = {name: to_torch(weights[name]).to(self._device) for name in needed}
        self._states = {name: to_torch(state).to(self._device) for name, state in states.items()}

    def start(
        self, graph: str, inputs: Sequence[np.ndarray], *, logits: bool
    ) -> Callable[[], Sequence[np.ndarray | None]]:
        outputs = self._run_graph(graph, inputs)
        for draw, taken in self.find_due(graph, inputs):
            (outputs[draw.tokens],) = self._run_graph(draw.graph, taken)
        wanted = [logits or not name.endswith(LOGITS) for name in returned_names(self._described[graph])]
        return lambda: [_to_host(each) if is_wanted else None for each, is_wanted in zip(outputs, wanted, strict=True)]

    def _run_graph(self, graph: str, inputs: Sequence[np.ndarray]) -> list[Tensor]:
        program, bound = self._programs[graph], self._weights | self._states
        given = dict(zip(self._calls.get(graph, program.io.names("input")), inputs, strict=True))
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

    def read_state(self, name: str) -> np.ndarray:
        return _to_host(self._states[name])

    def write_state(self, name: str, array: np.ndarray) -> None:
        self._states[name] = to_torch(array).to(self._device)


def _to_host(result: Tensor) -> np.ndarray:
    return to_numpy(result.cpu())
