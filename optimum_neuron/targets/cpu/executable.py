# SPDX-License-Identifier: Apache-2.0
"""Plans bound to weights and state, and run: kernels by the library, other operators by torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...graphs.kv_cache import copy_slot
from ...graphs.spec import GraphSpec
from . import library
from .memory import PlanMemory
from .plan.encode import PlanError, encode
from .plan.operators import resolve
from .plan.program import Plan, TorchCall


class BoundPlan:
    """One graph: its steps in order, as runs of kernels with calls of torch in between."""

    def __init__(
        self, plan: Plan, spec: GraphSpec, vocab_size: int, tensors: Mapping[str, Tensor], arena: Tensor
    ) -> None:
        """Binds a plan.

        Args:
            tensors: weights, states and the plan's constants by name; they stay where they are.
            arena: bytes that all graphs share, as they run one at a time.

        Raises:
            PlanError: the plan does not fit its buffers.
        """
        self._library = library.load()
        self._plan = plan
        self._memory = PlanMemory(plan, spec, vocab_size, tensors, arena)
        words, self._segments = self._encode()
        array = np.array(words, dtype=np.int64)
        self._handle = self._library.step_plan(array.ctypes.data, len(words))
        if not self._handle:
            raise PlanError("its steps cannot be read")
        for step in plan.once:
            self._torch_call(step)()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.step_free(self._handle)

    def _encode(self) -> tuple[list[int], list[Callable[[], None]]]:
        """The words of all kernel steps, and what runs the steps in order."""
        words: list[int] = []
        segments: list[Callable[[], None]] = []
        native = begin = 0
        for step in self._plan.steps:
            if isinstance(step, TorchCall):
                if native > begin:
                    segments.append(self._kernels(begin, native))
                begin = native
                segments.append(self._torch_call(step))
            else:
                words += encode(step, self._plan.buffers)
                native += 1
        if native > begin:
            segments.append(self._kernels(begin, native))
        return words, segments

    def _kernels(self, begin: int, end: int) -> Callable[[], None]:
        def run() -> None:
            refused = self._library.step_run(self._handle, begin, end, self._memory.addresses, torch.get_num_threads())
            if refused >= 0:
                raise IndexError("the step was given a token, position or slot that the graph does not have")

        return run

    def _torch_call(self, step: TorchCall) -> Callable[[], None]:
        operator = resolve(step.operator)
        arguments = [self._argument(each) for each in step.arguments]
        keywords = {name: self._argument(each) for name, each in step.keywords.items()}
        outputs = [None if each is None else self._memory.tensor(each) for each in step.outputs]
        self._check_call(operator, arguments, keywords, outputs)

        def run() -> None:
            results = operator(*arguments, **keywords)
            for output, result in zip(outputs, (results,) if isinstance(results, Tensor) else results, strict=False):
                if output is not None:
                    output.copy_(result)

        return run

    def _check_call(
        self, operator: Any, arguments: list[Any], keywords: dict[str, Any], outputs: Sequence[Tensor | None]
    ) -> None:
        """Raises PlanError where a call's results do not fit their places, found by shapes alone."""
        try:
            results = operator(*_without_memory(arguments), **_without_memory(keywords))
        except Exception as error:  # of whatever arguments it was given
            raise PlanError(f"its call of {operator} fails: {error}") from error
        for output, result in zip(outputs, (results,) if isinstance(results, Tensor) else results, strict=False):
            if output is not None and (output.shape != result.shape or output.dtype != result.dtype):
                raise PlanError(
                    f"its call of {operator} gives {result.dtype} {list(result.shape)}, which has no place"
                )

    def _argument(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._argument(each) for each in value]
        if isinstance(value, dict):
            if "tensor" in value:
                return self._memory.tensor(value["tensor"])
            if "dtype" in value:
                return getattr(torch, value["dtype"])
            return float(value["number"])
        return value

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        outputs = self._memory.start(inputs)
        for segment in self._segments:
            segment()
        return outputs


def _without_memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, list):
        return [_without_memory(each) for each in value]
    return {name: _without_memory(each) for name, each in value.items()} if isinstance(value, dict) else value


class CpuExecutable:
    """Plans by name, all bound to the same weights and KV state."""

    def __init__(self, plans: Mapping[str, BoundPlan], states: dict[str, Tensor]) -> None:
        self._plans = plans
        self._states = states
        self._running = threading.Lock()  # they share their arena

    def run(self, graph: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        with self._running, torch.no_grad():
            return self._plans[graph].run(inputs)

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        copy_slot(self._states.values(), source, destination, length)

    def read_state(self, name: str) -> Tensor:
        return self._states[name].clone()

    def write_state(self, name: str, tensor: Tensor) -> None:
        self._states[name].copy_(tensor)
