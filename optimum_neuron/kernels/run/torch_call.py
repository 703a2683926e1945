# SPDX-License-Identifier: Apache-2.0
"""Calls of torch's operators within a plan, bound to its memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..steps.access import PlanError, require, writes_in_place
from ..steps.steps import Operand, TorchCall
from ..steps.torch_operators import check_arguments, resolve, row_operands
from .memory import PlanMemory, check_bytes


def bind_call(step: TorchCall, memory: PlanMemory) -> Callable[[int], None]:
    """Return a function that makes a call, given the number of live tokens.

    Raises:
        PlanError: a plan may not make the call, the call fails, or its results do not fit their places.
    """
    operator = resolve(step.operator)
    arguments = [_bind_argument(each, memory) for each in step.arguments]
    keywords = {name: _bind_argument(each, memory) for name, each in step.keywords.items()}
    outputs = [None if each is None else _view_operand(each, memory) for each in step.outputs]
    check_arguments(step.operator, arguments, keywords)
    _check_call(step, operator, arguments, keywords, outputs)

    @torch.no_grad()
    def run_call(arguments: list[Any], outputs: Sequence[Tensor | None]) -> None:
        results = operator(*arguments, **keywords)
        for output, result in zip(outputs, _list_tensors(results), strict=False):
            if output is not None:
                output.copy_(result)

    if step.tokens is None:
        return lambda live: run_call(arguments, outputs)
    first, count, dim = step.tokens.first, step.tokens.count, step.dim
    own = _find_row_arguments(step)

    def run_live(live: int) -> None:
        tokens = min(live - first, count)
        if tokens > 0:
            fewer = [each.narrow(dim, 0, tokens) if i in own else each for i, each in enumerate(arguments)]
            run_call(fewer, [None if each is None else each.narrow(dim, 0, tokens) for each in outputs])

    return run_live


def _find_row_arguments(step: TorchCall) -> set[int]:
    """Return the numbers of the arguments that can lose rows."""
    assert step.tokens is not None
    dims = {len(each.shape) for each in step.outputs if each is not None}
    operands = row_operands(step, step.dim) if len(dims) == 1 and 0 <= step.dim < dims.pop() else []
    if not operands or any(each.shape[step.dim] != step.tokens.count for each in operands):
        raise PlanError(f"its call of {step.operator} does not compute {step.tokens.count} tokens one by one")
    return {i for i, each in enumerate(step.arguments) if _operand_of(each) in operands}


def _operand_of(argument: Any) -> Operand | None:
    return argument.get("tensor") if isinstance(argument, dict) else None


def call_once(step: TorchCall, memory: PlanMemory) -> None:
    """Make a call when its plan is bound.

    Raises:
        PlanError: as `bind_call`, or the call fails on what it is given.
    """
    call = bind_call(step, memory)
    try:
        call(1)
    except (RuntimeError, IndexError) as error:
        raise PlanError(f"its call of {step.operator} fails: {_first_line(error)}") from error


def _check_call(
    step: TorchCall, operator: Any, arguments: list[Any], keywords: dict[str, Any], outputs: Sequence[Tensor | None]
) -> None:
    """Raise PlanError where a call's results do not fit their places, found by shapes alone."""
    try:
        results = _list_tensors(operator(*_without_memory(arguments), **_without_memory(keywords)))
    except Exception as error:  # of whatever arguments it was given
        raise PlanError(f"its call of {step.operator} fails: {_first_line(error)}") from error
    require(all(isinstance(each, Tensor) for each in results), f"its call of {step.operator} gives no tensor")
    known = list(_find_tensors([arguments, keywords]))
    check_bytes(sum(each.numel() * each.itemsize for each in (*known, *results)) + _count_work(step, known, results))
    if writes_in_place(step):
        return
    require(
        len(results) == len(outputs), f"its call of {step.operator} gives {len(results)} results, not {len(outputs)}"
    )
    for output, result in zip(outputs, results, strict=True):
        if output is not None and (output.shape != result.shape or output.dtype != result.dtype):
            raise PlanError(
                f"its call of {step.operator} gives {result.dtype} {list(result.shape)}, which has no place"
            )


def _count_work(step: TorchCall, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """Return the most bytes that torch may copy of a product's operands: for each batch its own."""
    if not step.operator.startswith("aten.matmul") or len(operands) != 2:
        return 0
    batches = math.prod(results[0].shape[:-2])
    return batches * sum(math.prod(each.shape[-2:]) * each.itemsize for each in operands)


def _list_tensors(results: Any) -> Sequence[Tensor]:
    return results if isinstance(results, list | tuple) else (results,)


def _find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors among arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _find_tensors(each)


def _bind_argument(value: Any, memory: PlanMemory) -> Any:
    if isinstance(value, list):
        return [_bind_argument(each, memory) for each in value]
    if isinstance(value, dict):
        if "tensor" in value:
            return _view_operand(value["tensor"], memory)
        if "dtype" in value:
            return getattr(torch, value["dtype"])
        return float(value["number"])
    return value


def _view_operand(operand: Operand, memory: PlanMemory) -> Tensor:
    found, dtype = torch.from_numpy(memory.find_bytes(operand)), getattr(torch, operand.dtype)
    whole = found[: len(found) // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole.as_strided(operand.shape, operand.strides, operand.offset)


def _without_memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, list):
        return [_without_memory(each) for each in value]
    return {name: _without_memory(each) for name, each in value.items()} if isinstance(value, dict) else value


def _first_line(error: Exception) -> str:
    """Return what an error says first; errors of torch add a trace of its own code."""
    return (str(error).splitlines() or [type(error).__name__])[0]
