# SPDX-License-Identifier: Apache-2.0
"""Executables of lowered graphs: each step is started, then read, and graphs of their own sample and copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from ....step.sampling.sampler import TEMPERATURE
from ....step.spec import DECODE, SAMPLING_PARAMS, UNIFORMS
from ... import Executable
from ..graphs.io import COPY_SLOT, KEEP_STATE, RESTORE_STATE, SAMPLERS, GraphIO
from ..graphs.state_graphs import slots_input
from .load_plan import copy_inputs


class AheadExecutable(Executable):
    """The part of an executable that follows from `start`; `graphs` are the names of those that it has."""

    runs_ahead = True

    def __init__(self, graphs: Collection[str]) -> None:
        self._names = graphs

    def run(self, graph: str, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return cast(Sequence[np.ndarray], self.start(graph, inputs, logits=True)())

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        self._run_copy(COPY_SLOT, source, destination, length)

    def keep_state(self, slot: int, snapshot: int) -> None:
        self._run_copy(KEEP_STATE, slot, snapshot, 1)

    def restore_state(self, snapshot: int, slot: int) -> None:
        self._run_copy(RESTORE_STATE, snapshot, slot, 1)

    def _run_copy(self, graph: str, source: int, destination: int, length: int) -> None:
        if graph in self._names:
            self.run(graph, copy_inputs(source, destination, length))


# A row that chooses for no slot; a copy of nothing is zeros.
_NO_SLOT = dict.fromkeys(map(slots_input, SAMPLERS), -1)


def idle_inputs(graphs: Mapping[str, GraphIO], steps: Collection[str]) -> dict[str, list[np.ndarray]]:
    """Return inputs with which graphs that are no steps change nothing, for the slow first run of each.

    Args:
        steps: names of graphs that are steps.
    """
    return {
        name: [
            np.full(each.shape, _NO_SLOT.get(each.name, 0), each.dtype) for each in io.inputs if each.role == "input"
        ]
        for name, io in graphs.items()
        if name not in steps
    }


@dataclass(frozen=True)
class Draw:
    """A graph that draws a group's tokens, with the numbers of a step's inputs and output that it takes and replaces.

    Attributes:
        slots: the number of chunk rows' slots; None of decode rows.
    """

    graph: str
    positions: int
    sampling_params: int
    uniforms: int
    slots: int | None
    tokens: int

    def is_due(self, inputs: Sequence[np.ndarray]) -> bool:
        """Return whether a row that is not idle is to be drawn: all others keep the largest, which the step has chosen."""
        return bool(((inputs[self.sampling_params][:, TEMPERATURE] > 0) & (inputs[self.positions][:, 0] >= 0)).any())

    def take_inputs(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the sampler's inputs, from those of a step."""
        positions = inputs[self.positions]
        slots = np.arange(len(positions), dtype=np.int32) if self.slots is None else inputs[self.slots]
        active = np.where(positions[:, 0] >= 0, slots, np.int32(-1))  # as step.sampling.buffers.slots_of_rows
        return [inputs[self.sampling_params], inputs[self.uniforms], active]


def find_draws(calls: Mapping[str, Sequence[str]], graphs: Mapping[str, GraphIO]) -> dict[str, tuple[Draw, ...]]:
    """Return the draws of each step; `calls` names the inputs of each step in order."""
    return {name: tuple(_find_step_draws(call, graphs[name])) for name, call in calls.items()}


def _find_step_draws(call: Sequence[str], io: GraphIO) -> list[Draw]:
    returned = [each.name for each in io.outputs if each.alias_of is None]
    return [
        Draw(
            graph,
            call.index(f"{group}.position_ids"),
            call.index(f"{group}.{SAMPLING_PARAMS}"),
            call.index(f"{group}.{UNIFORMS}"),
            None if group == DECODE else call.index(f"{group}.seq_ids"),
            returned.index(f"{group}.tokens"),
        )
        for group, graph in SAMPLERS.items()
        if f"{group}.{SAMPLING_PARAMS}" in call
    ]
