# SPDX-License-Identifier: Apache-2.0
"""A plan bound to memory, and run by the library of kernels. Steps have names for people."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property

import numpy as np

from ..steps.access import PlanError, find_operands, list_written
from ..steps.operands import Buffer
from ..steps.steps import Linears, PlanData, Step
from .encode import encode_step
from .memory import PlanMemory, TensorForm


# Memory of these kinds is read by no later run.
_OF_A_RUN = ("input", "output", "arena")


class BoundPlan:
    """One graph: its steps in order.

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
        words = np.array(
            [word for step in (*plan.once, *plan.steps) for word in encode_step(step, plan.buffers, short_scales)],
            dtype=np.int64,
        )
        self._handle = library.step_plan(words.ctypes.data, len(words))
        if not self._handle:
            raise PlanError("its steps cannot be read")
        self._first = len(plan.once)
        self._end, self._states_end = (self._first + steps for steps in (len(plan.steps), count_state_steps(plan)))
        try:
            self._run_steps(0, self._first, 1)
        except IndexError as error:
            raise PlanError(f"what it computes once fails: {error}") from error

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.step_free(self._handle)

    def _run_steps(self, begin: int, end: int, live: int) -> None:
        """Run steps by their numbers, for so many live tokens; those that are computed once come first."""
        run = self._library.step_run
        if begin < end and run(self._handle, begin, end, self._memory.addresses, live, self._threads()) >= 0:
            raise IndexError("it takes a token, position or slot that the graph does not have")

    def run(self, inputs: Sequence[np.ndarray], live: int) -> tuple[np.ndarray, ...]:
        """Run the graph for its first `live` tokens, and return its outputs; their rows of other tokens are undefined.

        Raises:
            IndexError: a step takes an index that its operand does not have.
        """
        self._memory.take_inputs(inputs)
        self._run_steps(self._first, self._end, live)
        return self.outputs

    def run_for_states(self, inputs: Sequence[np.ndarray], live: int) -> None:
        """Run the graph without what only outputs need."""
        self._memory.take_inputs(inputs)
        self._run_steps(self._first, self._states_end, live)

    def run_by_operators(
        self, inputs: Sequence[np.ndarray], live: int, ended: Callable[[str], None], *, outputs: bool
    ) -> tuple[np.ndarray, ...]:
        """Do as `run`, or without `outputs` as `run_for_states`, a step at a time; `ended` gets the name of each."""
        self._memory.take_inputs(inputs)
        for number in range(self._first, self._end if outputs else self._states_end):
            self._run_steps(number, number + 1, live)
            ended(self._names[number - self._first])
        return self.outputs

    @cached_property
    def _names(self) -> list[str]:
        return [name_step(step, self._plan.buffers) for step in self._plan.steps]


def count_state_steps(plan: PlanData) -> int:
    """Return the number of steps up to the last one that writes to what outlives a run; later ones serve the outputs alone."""
    for number in range(len(plan.steps), 0, -1):
        if any(plan.buffers[each.buffer].kind not in _OF_A_RUN for each in list_written(plan.steps[number - 1])):
            return number
    return 0


def name_step(step: Step, buffers: Sequence[Buffer]) -> str:
    """Return a name as "Linears model.model.layers.0.self_attn.q_proj.weight + 2", of three that share their input."""
    kind = type(step).__name__
    layers = [layer.weight for layer in step.layers] if isinstance(step, Linears) else []
    members = ("state", "weight", "keys", "source", "cache", "codes", "items")  # the first that it has names it
    naming = next((getattr(step, each) for each in members if hasattr(step, each)), layers)
    held = [buffers[each.buffer] for each in find_operands(naming)]
    named = list(dict.fromkeys(each.name for each in held if each.kind == "tensor"))
    more = f" + {len(named) - 1}" if len(named) > 1 else ""
    return f"{kind} {named[0]}{more}" if named else kind
