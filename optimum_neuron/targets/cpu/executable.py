# SPDX-License-Identifier: Apache-2.0
"""Plans bound to weights and state, and run: kernels by the library, other operators by torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...errors import first_line
from ...kernels.build import library
from ...kernels.plan.access import PlanError
from ...kernels.plan.program import Plan, TorchCall
from ...kernels.plan.states import steps_for_states
from ...kernels.plan.step_names import step_name
from ...kernels.run.encode import encode
from ...kernels.run.memory import PlanMemory
from ...kernels.run.torch_call import bind_call, run_once
from ...step.spec import GraphSpec
from ..host_states import HostStates
from .live_tokens import LiveTokens


class BoundPlan:
    """One graph: its steps in order, as runs of kernels with calls of torch in between."""

    def __init__(
        self,
        plan: Plan,
        spec: GraphSpec,
        vocab_size: int,
        tensors: Mapping[str, Tensor],
        arena: Tensor,
        short_scales: Collection[str] = (),
    ) -> None:
        """Binds a plan.

        Args:
            tensors: weights, states and the plan's constants by name; they stay where they are.
            arena: bytes that all graphs share, as they run one at a time.
            short_scales: of which tensors all graphs take scales for short ones (plan/short_scales.py).

        Raises:
            PlanError: the plan does not fit its buffers.
        """
        self._library = library.load()
        self._plan = plan
        self._memory = PlanMemory(plan, spec, vocab_size, tensors, arena)
        has, wanted = len(self._memory.outputs), len(spec.outputs(vocab_size))
        if has != wanted:
            raise PlanError(f"it has {has} outputs, and its graph {wanted}")
        words, calls = self._encode(short_scales)
        self._segments = self._group(calls)
        self._state_steps = steps_for_states(plan)
        self._for_states = self._group(calls[: self._state_steps])
        array = np.array(words, dtype=np.int64)
        self._handle = self._library.step_plan(array.ctypes.data, len(words))
        if not self._handle:
            raise PlanError("its steps cannot be read")
        for step in plan.once:
            run_once(step, self._memory)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.step_free(self._handle)

    def _encode(self, short_scales: Collection[str]) -> tuple[list[int], list[Callable[[int], None] | None]]:
        """The words of all kernel steps, and for each step the call of torch that it is, if it is one."""
        words: list[int] = []
        calls: list[Callable[[int], None] | None] = []
        for step in self._plan.steps:
            if isinstance(step, TorchCall):
                calls.append(bind_call(step, self._memory))
            else:
                words += encode(step, self._plan.buffers, short_scales)
                calls.append(None)
        return words, calls

    def _group(self, calls: Sequence[Callable[[int], None] | None]) -> list[Callable[[int], None]]:
        """What runs the first steps in order, given the calls of torch among them: kernels side by side as one."""
        segments: list[Callable[[int], None]] = []
        begin = end = 0
        for call in calls:
            if call is None:
                end += 1
                continue
            if end > begin:
                segments.append(self._kernels(begin, end))
            begin = end
            segments.append(call)
        if end > begin:
            segments.append(self._kernels(begin, end))
        return segments

    def _kernels(self, begin: int, end: int) -> Callable[[int], None]:
        def run(live: int) -> None:
            refused = self._library.step_run(
                self._handle, begin, end, self._memory.addresses, live, torch.get_num_threads()
            )
            if refused >= 0:
                raise IndexError("it takes a token, position or slot that the graph does not have")

        return run

    def run(self, inputs: Sequence[Tensor], live: int) -> tuple[Tensor, ...]:
        """Runs the graph for its first `live` tokens; what its outputs hold of the rest is undefined."""
        self._memory.start(inputs)
        for segment in self._segments:
            segment(live)
        return self._memory.outputs

    def run_for_states(self, inputs: Sequence[Tensor], live: int) -> None:
        """The same, without what only outputs need."""
        self._memory.start(inputs)
        for segment in self._for_states:
            segment(live)

    def run_by_operators(
        self, inputs: Sequence[Tensor], live: int, ended: Callable[[str], None], *, outputs: bool
    ) -> tuple[Tensor, ...]:
        """As `run`, or without `outputs` as `run_for_states`, a step at a time; `ended` gets the name of each."""
        self._memory.start(inputs)
        for name, run in self._operators if outputs else self._operators[: self._state_steps]:
            run(live)
            ended(name)
        return self._memory.outputs

    @cached_property
    def _operators(self) -> list[tuple[str, Callable[[int], None]]]:
        operators = []
        native = 0
        for step in self._plan.steps:
            if isinstance(step, TorchCall):
                run = bind_call(step, self._memory)
            else:
                run = self._kernels(native, native + 1)
                native += 1
            operators.append((step_name(step, self._plan.buffers), run))
        return operators


class CpuExecutable(HostStates):
    """Plans by name, all bound to the same weights and KV state.

    Args:
        plans: each with what counts the live tokens of its inputs.
        snapshots: as in `SlotCopies`.
    """

    def __init__(
        self,
        plans: Mapping[str, tuple[BoundPlan, LiveTokens]],
        states: dict[str, Tensor],
        snapshots: Mapping[str, Tensor],
    ) -> None:
        super().__init__(states, snapshots)
        self._plans = plans
        self._running = threading.Lock()  # they share their arena

    def run(self, graph: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        with self._bound(graph) as (plan, live_tokens):
            return plan.run(inputs, live_tokens(inputs))

    def run_for_states(self, graph: str, inputs: Sequence[Tensor]) -> None:
        with self._bound(graph) as (plan, live_tokens):
            plan.run_for_states(inputs, live_tokens(inputs))

    def run_by_operators(
        self, graph: str, inputs: Sequence[Tensor], ended: Callable[[str], None], *, outputs: bool = True
    ) -> Sequence[Tensor]:
        with self._bound(graph) as (plan, live_tokens):
            return plan.run_by_operators(inputs, live_tokens(inputs), ended, outputs=outputs)

    @contextmanager
    def _bound(self, graph: str) -> Iterator[tuple[BoundPlan, LiveTokens]]:
        """The plan of a graph, which runs alone meanwhile.

        Raises:
            RuntimeError: a step takes an index that its operand does not have. Runners check what they give to a graph.
        """
        with self._running:
            try:
                yield self._plans[graph]
            except IndexError as error:
                raise RuntimeError(f"graph {graph} cannot run: {first_line(error)}; export the model again") from error
