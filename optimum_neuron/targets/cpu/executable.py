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
            if positions.shape[1] == 1:
                end, rows = len(positions), positions.data  # of which Python reads numbers faster
                while end and rows[end - 1, 0] < 0:
                    end -= 1
            else:
                live = positions >= 0
                live[:, 1:] &= positions[:, 1:] > positions[:, :-1]
                places = live.reshape(-1).nonzero()[0]
                end = int(places[-1]) + 1 if len(places) else 0
            last = total + end if end else last
            total += positions.size
        return last or total


class CpuExecutable(HostStates):
    """Plans by name, all bound to the same weights and KV state; each has what counts the live tokens of its inputs."""

    def __init__(
        self,
        plans: Mapping[str, tuple[BoundPlan, LiveTokens]],
        states: Mapping[str, np.ndarray],
        places: Mapping[str, np.ndarray],
    ) -> None:
        super().__init__(states, places)
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
        """Yield the plan of a graph, which runs alone meanwhile; raise RuntimeError where a step takes an index that is not there."""
        with self._running:
            try:
                yield self._plans[graph]
            except IndexError as error:
                raise RuntimeError(f"graph {graph} cannot run: {first_line(error)}; export the model again") from error
