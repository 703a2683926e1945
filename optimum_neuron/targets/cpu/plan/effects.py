# SPDX-License-Identifier: Apache-2.0
"""What each step of a plan reads and writes, and that a plan writes nothing that is not its own. Imports no torch.

Kernels and torch check an index where they first meet it, and read it again while they write. So no step writes over what it reads: it
could make an index of it that nothing has checked. A Map alone may, as it has no indices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple

from .access import PlanError, check_operand, check_size, item_size, require
from .program import (
    STATES,
    Buffer,
    Convolve,
    Linears,
    Map,
    Operand,
    Plan,
    Step,
    TorchCall,
    Walk,
    WriteCache,
    WriteCodes,
)


_WRITTEN: dict[type[Any], tuple[str, ...]] = {
    WriteCache: ("cache",),
    WriteCodes: ("codes", "scale"),
    Convolve: ("state", "output"),
    Walk: ("state", "output"),
}
_ALIGNMENT = 64


class _Span(NamedTuple):
    """Bytes of one piece of memory from the first that an operand has to its last."""

    memory: tuple[str, str]
    begin: int
    end: int

    def meets(self, other: _Span) -> bool:
        return self.memory == other.memory and self.begin < other.end and other.begin < self.end


def operands_of(value: Any) -> Iterator[Operand]:
    """Every operand in a step."""
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from operands_of(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from operands_of(each)
    else:
        kind: Any = type(value)
        for name in _members(kind):
            yield from operands_of(getattr(value, name))


@cache
def _members(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def writes_in_place(call: TorchCall) -> bool:
    """Whether an operator of torch writes to its first argument, as its name tells."""
    return call.operator.split(".")[1:2] != [] and call.operator.split(".")[1].endswith("_")


def written(step: Step) -> list[Operand]:
    """What a step writes to.

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
        raise PlanError(f"its call of {step.operator} has no tensor to write to, or another one beside it")
    return [first["tensor"]]


def check_plan(plan: Plan, dtypes: Mapping[str, str]) -> None:
    """Checks the sizes of a plan's buffers, and what each of its steps reads and writes.

    Args:
        dtypes: of the tensors and constants that there are, by name.

    Raises:
        PlanError: a step leaves its buffers, takes a tensor as another type, writes to what is not its own, or writes over what it reads.
    """
    check_size(plan.arena)
    for buffer in plan.buffers:
        check_size(buffer.bytes)
        check_size(buffer.offset)
        fits = buffer.kind != "arena" or buffer.offset + buffer.bytes <= plan.arena
        require(
            fits and buffer.offset % _ALIGNMENT == 0, f"it has a buffer at {buffer.offset} of an arena of {plan.arena}"
        )
    for call in plan.once:
        _check_step(call, plan.buffers, dtypes, ("kept",))
    for step in plan.steps:
        _check_step(step, plan.buffers, dtypes, ("arena", "output"))


def _check_step(step: Step, buffers: Sequence[Buffer], dtypes: Mapping[str, str], own: Collection[str]) -> None:
    spans = []
    targets = written(step)
    for target in targets:
        _check_access(target, buffers, dtypes)
        buffer = buffers[target.buffer]
        is_state = buffer.kind == "tensor" and buffer.name.startswith(STATES) and "kept" not in own
        require(buffer.kind in own or is_state, f"its {_name(step)} writes to the {buffer.kind} {buffer.name!r}")
        require(_has_places(target), f"its {_name(step)} writes several elements to one place")
        spans.append(_span(target, buffer, target.buffer))
    for each in operands_of(step):
        if any(each is target for target in targets):
            continue
        _check_access(each, buffers, dtypes)
        if not isinstance(step, Map):
            read = _span(each, buffers[each.buffer], each.buffer)
            require(not any(read.meets(span) for span in spans), f"its {_name(step)} writes over what it reads")


def _check_access(operand: Operand, buffers: Sequence[Buffer], dtypes: Mapping[str, str]) -> None:
    check_operand(operand, buffers)
    buffer = buffers[operand.buffer]
    if buffer.kind in ("tensor", "constant") and dtypes.get(buffer.name) != operand.dtype:
        found = dtypes.get(buffer.name)
        raise PlanError(f"it takes the {buffer.kind} {buffer.name!r}, of type {found}, as {operand.dtype}")


def _name(step: Step) -> str:
    return f"call of {step.operator}" if isinstance(step, TorchCall) else type(step).__name__


def _has_places(operand: Operand) -> bool:
    """Whether each element has a place of its own."""
    reach = 0
    for stride, size in sorted(zip(operand.strides, operand.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def _span(operand: Operand, buffer: Buffer, number: int) -> _Span:
    size = item_size(operand.dtype)
    reach = sum((count - 1) * stride for count, stride in zip(operand.shape, operand.strides, strict=True))
    begin = operand.offset * size
    end = begin if 0 in operand.shape else begin + (reach + 1) * size
    if buffer.kind == "arena":
        return _Span(("arena", ""), buffer.offset + begin, buffer.offset + end)
    return _Span((buffer.kind, buffer.name or str(number)), begin, end)
