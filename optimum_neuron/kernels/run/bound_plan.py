# SPDX-License-Identifier: Apache-2.0
"""A plan bound to memory, and run: kernels by their library, other operators by torch. Steps have names for people."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count

import numpy as np

from ..steps.access import PlanError, find_operands, list_written
from ..steps.steps import Buffer, Linears, PlanData, Step, TorchCall
from .encode import encode_step
from .memory import PlanMemory, TensorForm


# Memory of these kinds is read by no later run.
_OF_A_RUN = ("input", "output", "arena")
# Runs a part of a plan, for so many live tokens.
_Run = Callable[[int], None]


class BoundPlan:
    """One graph: its steps in order, as runs of kernels with calls of torch in between.

    Attributes:
        outputs: what the graph returns, in order: each run writes to the same memory, and so may runs of other plans.
    """

    def __init__(
        self,
        plan: PlanData,
        tensors: Mapping[str, np.ndarray],
        inputs: Sequence[TensorForm],
        outputs: Sequence[TensorForm],
        arena: np.ndarray,
        library: ctypes.CDLL,
        short_scales: Collection[str],
        threads: Callable[[], int],
    ) -> None:
        """Bind a plan, as `Plan.bind`."""
        self._library, self._threads = library, threads
        self._plan = plan
        self._memory = PlanMemory(plan.buffers, inputs, outputs, tensors, arena)
        self.outputs = self._memory.outputs
        words: list[int] = []
        calls: list[_Run | None] = []  # for each step the call of torch that it is
        for step in (*plan.once, *plan.steps):
            if isinstance(step, TorchCall):
                from .torch_call import bind_call  # imports torch, which most plans do without

                calls.append(bind_call(step, self._memory))
            else:
                words += encode_step(step, plan.buffers, short_scales)
                calls.append(None)
        array = np.array(words, dtype=np.int64)
        self._handle = library.step_plan(array.ctypes.data, len(words))
        if not self._handle:
            raise PlanError("its steps cannot be read")
        once, self._calls = calls[: len(plan.once)], calls[len(plan.once) :]
        self._first = once.count(None)  # the number of the first kernel that each run calls
        self._segments = list(self._group_calls(self._calls, self._first))
        self._state_steps = count_state_steps(plan)
        self._state_segments = list(self._group_calls(self._calls[: self._state_steps], self._first))
        for segment in self._group_calls(once, 0):
            try:
                segment(1)
            except (RuntimeError, IndexError) as error:
                raise PlanError(f"what it computes once fails: {(str(error).splitlines() or [''])[0]}") from error

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.step_free(self._handle)

    def _group_calls(self, calls: Sequence[_Run | None], begin: int) -> Iterator[_Run]:
        """Yield what runs steps in order, of which kernel `begin` is the first: adjacent kernels as one, and the calls of torch between."""
        end = begin  # numbers of kernel steps
        for call in calls:
            if call is None:
                end += 1
                continue
            if end > begin:
                yield self._bind_kernels(begin, end)
            begin = end
            yield call
        if end > begin:
            yield self._bind_kernels(begin, end)

    def _bind_kernels(self, begin: int, end: int) -> _Run:
        # It does not hold the plan, which holds it: memory is free once the last user is gone, and waits for no collector.
        library, handle, addresses, threads = self._library, self._handle, self._memory.addresses, self._threads

        def run_kernels(live: int) -> None:
            if library.step_run(handle, begin, end, addresses, live, threads()) >= 0:
                raise IndexError("it takes a token, position or slot that the graph does not have")

        return run_kernels

    def run(self, inputs: Sequence[np.ndarray], live: int) -> tuple[np.ndarray, ...]:
        """Run the graph for its first `live` tokens, and return its outputs; their rows of other tokens are undefined.

        Raises:
            IndexError: a step takes an index that its operand does not have.
        """
        self._memory.take_inputs(inputs)
        for segment in self._segments:
            segment(live)
        return self.outputs

    def run_for_states(self, inputs: Sequence[np.ndarray], live: int) -> None:
        """Run the graph without what only outputs need."""
        self._memory.take_inputs(inputs)
        for segment in self._state_segments:
            segment(live)

    def run_by_operators(
        self, inputs: Sequence[np.ndarray], live: int, ended: Callable[[str], None], *, outputs: bool
    ) -> tuple[np.ndarray, ...]:
        """Do as `run`, or without `outputs` as `run_for_states`, a step at a time; `ended` gets the name of each."""
        self._memory.take_inputs(inputs)
        for name, run in self._operators if outputs else self._operators[: self._state_steps]:
            run(live)
            ended(name)
        return self.outputs

    @cached_property
    def _operators(self) -> list[tuple[str, _Run]]:
        names = [name_step(step, self._plan.buffers) for step in self._plan.steps]
        native = count(self._first)
        runs = [call or self._bind_kernels(number := next(native), number + 1) for call in self._calls]
        return list(zip(names, runs, strict=True))


def count_state_steps(plan: PlanData) -> int:
    """Return the number of steps up to the last one that writes to what outlives a run; later ones serve the outputs alone."""
    for number in range(len(plan.steps), 0, -1):
        if any(plan.buffers[each.buffer].kind not in _OF_A_RUN for each in list_written(plan.steps[number - 1])):
            return number
    return 0


def name_step(step: Step, buffers: Sequence[Buffer]) -> str:
    """Return a name as "Linears model.model.layers.0.self_attn.q_proj.weight + 2", of three that share their input."""
    kind = step.operator if isinstance(step, TorchCall) else type(step).__name__
    layers = [layer.weight for layer in step.layers] if isinstance(step, Linears) else []
    members = ("state", "weight", "keys", "source", "cache", "codes", "items")  # the first that it has names it
    naming = next((getattr(step, each) for each in members if hasattr(step, each)), layers)
    held = [buffers[each.buffer] for each in find_operands(naming)]
    named = list(dict.fromkeys(each.name for each in held if each.kind == "tensor"))
    more = f" + {len(named) - 1}" if len(named) > 1 else ""
    return f"{kind} {named[0]}{more}" if named else kind
