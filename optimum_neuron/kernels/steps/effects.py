# SPDX-License-Identifier: Apache-2.0
"""The operands that each step reads and writes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from .access import PlanError
from .steps import Convolve, Linears, Map, Operand, Step, TorchCall, Walk, WriteCache, WriteCodes


_WRITTEN: dict[type[Any], tuple[str, ...]] = {
    WriteCache: ("cache",),
    WriteCodes: ("codes", "scale"),
    Convolve: ("state", "output"),
    Walk: ("state", "output"),
}
# Of what steps write, the parts that they change in place: the rest stays as it was.
_CHANGED: dict[type[Any], tuple[str, ...]] = {
    WriteCache: ("cache",),
    WriteCodes: ("codes", "scale"),
    Convolve: ("state",),
    Walk: ("state",),
}
_OVERWRITING = ("aten.copy_.default", "aten.fill_.Scalar", "aten.zero_.default")


def find_operands(value: Any) -> Iterator[Operand]:
    """Yield all operands in a step."""
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from find_operands(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from find_operands(each)
    else:
        kind: Any = type(value)
        for name in _members(kind):
            yield from find_operands(getattr(value, name))


@cache
def _members(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def writes_in_place(call: TorchCall) -> bool:
    """Return whether an operator of torch writes to its first argument, by its name."""
    return call.operator.split(".")[1:2] != [] and call.operator.split(".")[1].endswith("_")


def list_written(step: Step) -> list[Operand]:
    """Return the operands that a step writes to.

    Raises:
        PlanError: a call of torch has no tensor to write to.
    """
    if isinstance(step, Map):
        return [item.access for item in step.items if item.op == "store" and item.access is not None]
    if isinstance(step, Linears):
        return [layer.output for layer in step.layers]
    if not isinstance(step, TorchCall):
        return [getattr(step, name) for name in _WRITTEN.get(type(step), ("output",))]
    if not writes_in_place(step):
        return [each for each in step.outputs if each is not None]
    first = step.arguments[0] if step.arguments else None
    if not isinstance(first, dict) or "tensor" not in first or step.outputs:
        raise PlanError(f"its call of {step.operator} has no tensor to write to, or another one with it")
    return [first["tensor"]]


def list_accesses(step: Step) -> Iterator[tuple[Operand, bool]]:
    """Yield each operand in the order in which a step takes it, and whether it writes there.

    Raises:
        PlanError: as `written`.
    """
    if isinstance(step, Map):
        yield from ((item.access, item.op == "store") for item in step.items if item.access is not None)
        return
    targets = list_written(step)
    if isinstance(step, TorchCall):
        keeps = writes_in_place(step) and step.operator not in _OVERWRITING
        changed = targets if keeps else []
    else:
        changed = [getattr(step, name) for name in _CHANGED.get(type(step), ())]
    for each in find_operands(step):
        if not any(each is target for target in targets) or any(each is part for part in changed):
            yield each, False
    yield from ((target, True) for target in targets)
