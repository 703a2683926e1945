# SPDX-License-Identifier: Apache-2.0
"""Calls of torch's operators within a plan, bound to its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .memory import PlanMemory
from .plan.access import PlanError
from .plan.operators import resolve
from .plan.program import Operand, TorchCall
from .plan.row_calls import row_operands


def bind_call(step: TorchCall, memory: PlanMemory) -> Callable[[int], None]:
    """What makes a call, given how many of the graph's tokens are live.

    Raises:
        PlanError: the call fails, or its results do not fit their places.
        ValueError: a plan may not make it.
    """
    operator = resolve(step.operator)
    arguments = [_argument(each, memory) for each in step.arguments]
    keywords = {name: _argument(each, memory) for name, each in step.keywords.items()}
    outputs = [None if each is None else memory.tensor(each) for each in step.outputs]
    _check_call(operator, arguments, keywords, outputs)

    @torch.no_grad()
    def run(arguments: list[Any], outputs: Sequence[Tensor | None]) -> None:
        results = operator(*arguments, **keywords)
        for output, result in zip(outputs, (results,) if isinstance(results, Tensor) else results, strict=False):
            if output is not None:
                output.copy_(result)

    if step.tokens is None:
        return lambda live: run(arguments, outputs)
    first, count, dim = step.tokens.first, step.tokens.count, step.dim
    own = _row_arguments(step)

    def run_live(live: int) -> None:
        tokens = min(live - first, count)
        if tokens > 0:
            fewer = [each.narrow(dim, 0, tokens) if i in own else each for i, each in enumerate(arguments)]
            run(fewer, [None if each is None else each.narrow(dim, 0, tokens) for each in outputs])

    return run_live


def _row_arguments(step: TorchCall) -> set[int]:
    """The arguments of which rows can be left out."""
    assert step.tokens is not None
    dims = {len(each.shape) for each in step.outputs if each is not None}
    operands = row_operands(step, step.dim) if len(dims) == 1 and 0 <= step.dim < dims.pop() else []
    if not operands or any(each.shape[step.dim] != step.tokens.count for each in operands):
        raise PlanError(f"its call of {step.operator} does not compute {step.tokens.count} tokens one by one")
    return {i for i, each in enumerate(step.arguments) if _operand(each) in operands}


def _operand(argument: Any) -> Operand | None:
    return argument.get("tensor") if isinstance(argument, dict) else None


def _check_call(
    operator: Any, arguments: list[Any], keywords: dict[str, Any], outputs: Sequence[Tensor | None]
) -> None:
    """Raises PlanError where a call's results do not fit their places, found by shapes alone."""
    try:
        results = operator(*_without_memory(arguments), **_without_memory(keywords))
    except Exception as error:  # of whatever arguments it was given
        raise PlanError(f"its call of {operator} fails: {error}") from error
    for output, result in zip(outputs, (results,) if isinstance(results, Tensor) else results, strict=False):
        if output is not None and (output.shape != result.shape or output.dtype != result.dtype):
            raise PlanError(f"its call of {operator} gives {result.dtype} {list(result.shape)}, which has no place")


def _argument(value: Any, memory: PlanMemory) -> Any:
    if isinstance(value, list):
        return [_argument(each, memory) for each in value]
    if isinstance(value, dict):
        if "tensor" in value:
            return memory.tensor(value["tensor"])
        if "dtype" in value:
            return getattr(torch, value["dtype"])
        return float(value["number"])
    return value


def _without_memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, list):
        return [_without_memory(each) for each in value]
    return {name: _without_memory(each) for name, each in value.items()} if isinstance(value, dict) else value
