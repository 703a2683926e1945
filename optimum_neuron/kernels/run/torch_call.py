# SPDX-License-Identifier: Apache-2.0
"""Calls of torch's operators within a plan, bound to its memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..steps.access import PlanError, require, writes_in_place
from ..steps.steps import Operand, TorchCall
from ..steps.torch_operators import check_arguments, resolve
from .memory import PlanMemory, check_bytes


def bind_call(step: TorchCall, memory: PlanMemory) -> Callable[[int], None]:
    """Return a function that makes a call, for any number of live tokens.

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
    def run_call(live: int) -> None:
        results = operator(*arguments, **keywords)
        for output, result in zip(outputs, _list_tensors(results), strict=False):
            if output is not None:
                output.copy_(result)

    return run_call


def _check_call(
    step: TorchCall, operator: Any, arguments: list[Any], keywords: dict[str, Any], outputs: Sequence[Tensor | None]
) -> None:
    """Raise PlanError where a call's results do not fit their places, found by shapes alone."""
    name = f"its call of {step.operator}"
    try:
        given = pytree.tree_map_only(Tensor, lambda each: each.to("meta"), [arguments, keywords])
        results = _list_tensors(operator(*given[0], **given[1]))
    except Exception as error:  # of whatever arguments it was given
        raise PlanError(f"{name} fails: {_first_line(error)}") from error
    require(all(isinstance(each, Tensor) for each in results), f"{name} gives no tensor")
    known = [each for each in pytree.tree_leaves(given) if isinstance(each, Tensor)]
    work = sum(each.numel() * each.itemsize for each in (*known, *results))
    if step.operator.startswith("aten.matmul") and len(known) == 2:  # of each batch torch may copy the operands
        batches = math.prod(results[0].shape[:-2])
        work += batches * sum(math.prod(each.shape[-2:]) * each.itemsize for each in known)
    check_bytes(work)
    if writes_in_place(step):
        return
    require(len(results) == len(outputs), f"{name} gives {len(results)} results, not {len(outputs)}")
    for output, result in zip(outputs, results, strict=True):
        if output is not None and (output.shape != result.shape or output.dtype != result.dtype):
            raise PlanError(f"{name} gives {result.dtype} {list(result.shape)}, which has no place")


def _list_tensors(results: Any) -> Sequence[Tensor]:
    return results if isinstance(results, list | tuple) else (results,)


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


def _first_line(error: Exception) -> str:
    """Return what an error says first; errors of torch add a trace of its own code."""
    return (str(error).splitlines() or [type(error).__name__])[0]
