# SPDX-License-Identifier: Apache-2.0
"""Checks that a plan reads what is there, and writes to its own memory alone. Imports no torch.

Kernels and torch check an index where they first meet it, and read it again while they write. So no step writes over what it reads: it
could make an index of it that nothing has checked. A Map alone may, as it has no indices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from .access import ALIGNMENT, PlanError, check_operand, check_size, item_size, require
from .effects import find_operands, list_written
from .order import check_order
from .steps import STATES, Buffer, Map, Operand, PlanData, Step, TorchCall


class _ByteRange(NamedTuple):
    """Bytes of one piece of memory from the first that an operand has to its last."""

    memory: tuple[str, str]
    begin: int
    end: int

    def meets(self, other: _ByteRange) -> bool:
        return self.memory == other.memory and self.begin < other.end and other.begin < self.end


def check_steps(plan: PlanData, dtypes: Mapping[str, str]) -> None:
    """Check the sizes of buffers, what each step reads and writes, and the order of the steps, as `Plan.check`."""
    check_size(plan.arena)
    for buffer in plan.buffers:
        check_size(buffer.bytes)
        check_size(buffer.offset)
        fits = buffer.kind != "arena" or buffer.offset + buffer.bytes <= plan.arena
        require(
            fits and buffer.offset % ALIGNMENT == 0, f"it has a buffer at {buffer.offset} of an arena of {plan.arena}"
        )
    for call in plan.once:
        _check_step(call, plan.buffers, dtypes, ("kept",))
    for step in plan.steps:
        _check_step(step, plan.buffers, dtypes, ("arena", "output"))
    check_order(plan)


def _check_step(step: Step, buffers: Sequence[Buffer], dtypes: Mapping[str, str], own: Collection[str]) -> None:
    spans = []
    targets = list_written(step)
    for target in targets:
        _check_access(target, buffers, dtypes)
        buffer = buffers[target.buffer]
        is_state = buffer.kind == "tensor" and buffer.name.startswith(STATES) and "kept" not in own
        require(buffer.kind in own or is_state, f"its {_name(step)} writes to the {buffer.kind} {buffer.name!r}")
        require(_has_places(target), f"its {_name(step)} writes several elements to one place")
        spans.append(_span(target, buffer, target.buffer))
    for each in find_operands(step):
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
    """Return whether each element has a place of its own."""
    reach = 0
    for stride, size in sorted(zip(operand.strides, operand.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def _span(operand: Operand, buffer: Buffer, number: int) -> _ByteRange:
    size = item_size(operand.dtype)
    reach = sum((count - 1) * stride for count, stride in zip(operand.shape, operand.strides, strict=True))
    begin = operand.offset * size
    end = begin if 0 in operand.shape else begin + (reach + 1) * size
    if buffer.kind == "arena":
        return _ByteRange(("arena", ""), buffer.offset + begin, buffer.offset + end)
    return _ByteRange((buffer.kind, buffer.name or str(number)), begin, end)
