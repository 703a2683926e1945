# SPDX-License-Identifier: Apache-2.0
"""Bound plans as an executable, which runs them for the live tokens of their inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from ...errors import first_line
from ...kernels.run.bound_plan import BoundPlan
from ...step.spec import GraphSpec
from ..host_states import HostStates


class LiveTokens:
    """A count of the tokens of a graph's inputs up to the last live one, decode rows before chunk rows.

    A token of a chunk is live where its position is larger than the one before, a decode row's where it has one.
    """

    def __init__(self, spec: GraphSpec) -> None:
        inputs = enumerate(spec.inputs())
        self._positions = [place for place, each in inputs if each.name.endswith(".position_ids")]

    def __call__(self, inputs: Sequence[np.ndarray]) -> int:
        """Return the number for inputs as `GraphSpec.inputs`: at least one, and all where none is live, as in a warm-up."""
        last = total = 0
        for place in self._positions:
            positions = inputs[place]
            end = _end_of_rows(positions.data) if positions.shape[1] == 1 else _end_of_chunks(positions)
            last = total + end if end else last
            total += positions.size
        return last or total


def _end_of_rows(positions: memoryview) -> int:
    """Return the place after the last live one of `[rows, 1]`; 0 where none is."""
    end = len(positions)
    while end and positions[end - 1, 0] < 0:
        end -= 1
    return end


def _end_of_chunks(positions: np.ndarray) -> int:
    live = positions >= 0
    live[:, 1:] &= positions[:, 1:] > positions[:, :-1]
    places = live.reshape(-1).nonzero()[0]
    return int(places[-1]) + 1 if len(places) else 0


class CpuExecutable(HostStates):
    """Plans by name, all bound to the same weights and KV state.

    Args:
        plans: each with what counts the live tokens of its inputs.
        snapshots: as in `HostStates`.
    """

    def __init__(
        self,
        plans: Mapping[str, tuple[BoundPlan, LiveTokens]],
        states: Mapping[str, np.ndarray],
        snapshots: Mapping[str, np.ndarray],
    ) -> None:
        super().__init__(states, snapshots)
        self._plans = plans
        self._running = threading.Lock()  # they share their arena

    def run(self, graph: str, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        with self._hold_plan(graph) as (plan, live_tokens):
            return plan.run(inputs, live_tokens(inputs))

    def run_for_states(self, graph: str, inputs: Sequence[np.ndarray]) -> None:
        with self._hold_plan(graph) as (plan, live_tokens):
            plan.run_for_states(inputs, live_tokens(inputs))

    def run_by_operators(
        self, graph: str, inputs: Sequence[np.ndarray], ended: Callable[[str], None], *, outputs: bool = True
    ) -> Sequence[np.ndarray]:
        with self._hold_plan(graph) as (plan, live_tokens):
            return plan.run_by_operators(inputs, live_tokens(inputs), ended, outputs=outputs)

    @contextmanager
    def _hold_plan(self, graph: str) -> Iterator[tuple[BoundPlan, LiveTokens]]:
        """Yield the plan of a graph, which runs alone meanwhile.

        Raises:
            RuntimeError: a step takes an index that its operand does not have. Runners check what they give to a graph.
        """
        with self._running:
            try:
                yield self._plans[graph]
            except IndexError as error:
                raise RuntimeError(f"graph {graph} cannot run: {first_line(error)}; export the model again") from error
