# SPDX-License-Identifier: Apache-2.0
"""Checks that a plan reads what is there, and writes to its own memory alone. Imports no torch.

Kernels check an index where they first meet it, and read it again while they write. So no step writes over what it reads: it
could make an index of it that nothing has checked. A Map alone may, as it has no indices.

Each step reads weights, states, inputs, and what earlier steps wrote. Buffers of the arena share places. So a write to one of
them ends what the others held there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from .access import (
    ALIGNMENT,
    LARGEST,
    PlanError,
    check_operand,
    find_bytes,
    find_operands,
    item_size,
    list_accesses,
    list_written,
    require,
)
from .operands import STATES, Buffer, Operand
from .steps import Map, PlanData, Step


_ALWAYS = ("tensor", "constant")
# Pieces of all buffers together: more take too long to follow. Plans of large models have some thousands.
_MOST_PIECES = 1 << 31


def check_steps(plan: PlanData, dtypes: Mapping[str, str]) -> None:
    """Check the sizes of buffers, what each step reads and writes, and the order of the steps, as `Plan.check`."""
    for number in (plan.arena, *(size for buffer in plan.buffers for size in (buffer.bytes, buffer.offset))):
        require(0 <= number <= LARGEST, f"it has the size {number}, which is not within 0 and {LARGEST}")
    for buffer in plan.buffers:
        fits = buffer.offset % ALIGNMENT == 0 and (
            buffer.kind != "arena" or buffer.offset + buffer.bytes <= plan.arena
        )
        require(fits, f"it has a buffer at {buffer.offset} of an arena of {plan.arena}")
    for step in plan.once:
        _check_step(step, plan.buffers, dtypes, ("kept",))
    for step in plan.steps:
        _check_step(step, plan.buffers, dtypes, ("arena", "output"))
    check_order(plan)


def _check_step(step: Step, buffers: Sequence[Buffer], dtypes: Mapping[str, str], own: Collection[str]) -> None:
    name = type(step).__name__
    spans, targets = [], list_written(step)
    for target in targets:
        _check_access(target, buffers, dtypes)
        buffer = buffers[target.buffer]
        is_state = buffer.kind == "tensor" and buffer.name.startswith(STATES) and "kept" not in own
        require(buffer.kind in own or is_state, f"its {name} writes to the {buffer.kind} {buffer.name!r}")
        require(_has_places(target), f"its {name} writes several elements to one place")
        spans.append(_find_span(target, buffer))
    for each in find_operands(step):
        if any(each is target for target in targets):
            continue
        _check_access(each, buffers, dtypes)
        if not isinstance(step, Map):
            memory, begin, end = _find_span(each, buffers[each.buffer])
            meets = (other == memory and first < end and begin < last for other, first, last in spans)
            require(not any(meets), f"its {name} writes over what it reads")


def _check_access(operand: Operand, buffers: Sequence[Buffer], dtypes: Mapping[str, str]) -> None:
    check_operand(operand, buffers)
    buffer = buffers[operand.buffer]
    found = dtypes.get(buffer.name) if buffer.kind in _ALWAYS else operand.dtype
    require(found == operand.dtype, f"it takes the {buffer.kind} {buffer.name!r}, of type {found}, as {operand.dtype}")


def _has_places(operand: Operand) -> bool:
    """Return whether each element has a place of its own."""
    reach = 0
    for stride, size in sorted(zip(operand.strides, operand.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def _find_span(operand: Operand, buffer: Buffer) -> tuple[tuple[str, str], int, int]:
    """Return a piece of memory, and the bytes of an operand there."""
    own, in_arena = find_bytes(operand), buffer.kind == "arena"
    begin = buffer.offset if in_arena else 0
    memory = "" if in_arena else buffer.name or str(operand.buffer)
    return (buffer.kind, memory), begin + own.start, begin + own.stop


class _Access(NamedTuple):
    """Bytes of an operand: a run from `begin` on, and its repetitions, each a count and a distance."""

    buffer: int
    writes: bool
    begin: int
    run: int
    repeats: tuple[tuple[int, int], ...]


def check_order(plan: PlanData) -> None:
    """Raise PlanError where a step reads what no earlier step wrote or a later buffer replaced, or an output is not written whole.

    The operands of the plan must lie in their buffers.
    """
    once, steps = (
        [_find_access(*each) for step in part for each in list_accesses(step)] for part in (plan.once, plan.steps)
    )
    contents = _Contents(plan.buffers, [*once, *steps])
    for each in once:
        contents.take_access(each)
    for index, buffer in enumerate(plan.buffers):
        if buffer.kind == "input":
            contents.held[index] = contents.fill_buffer(index)
    for each in steps:
        contents.take_access(each)
    for index, buffer in enumerate(plan.buffers):
        whole = buffer.kind != "output" or contents.held.get(index, 0) == contents.fill_buffer(index)
        require(whole, f"it does not write all of output {buffer.name}")


def _find_access(operand: Operand, writes: bool) -> _Access:
    size = run = item_size(operand.dtype)
    if 0 in operand.shape:
        return _Access(operand.buffer, writes, 0, 0, ())
    repeats: list[tuple[int, int]] = []
    for stride, count in sorted(zip(operand.strides, operand.shape, strict=True)):
        if count > 1 and stride * size == run and not repeats:
            run *= count
        elif count > 1 and stride:
            repeats.append((count, stride * size))
    return _Access(operand.buffer, writes, operand.offset * size, run, tuple(repeats))


class _Contents:
    """The contents of buffers, each as a number with a bit for each piece. All places begin and end between pieces."""

    def __init__(self, buffers: Sequence[Buffer], found: Iterable[_Access]) -> None:
        self._buffers = buffers
        self._units = [buffer.bytes for buffer in buffers]
        for each in found:
            distances = (distance for _, distance in each.repeats)
            self._units[each.buffer] = math.gcd(self._units[each.buffer], each.begin, each.run, *distances)
        pieces = sum(self._count_pieces(index) for index, buffer in enumerate(buffers) if buffer.kind not in _ALWAYS)
        require(pieces <= _MOST_PIECES, f"it takes its memory in {pieces} pieces, and may in {_MOST_PIECES}")
        self.held: dict[int, int] = {}

    def _count_pieces(self, index: int) -> int:
        return self._buffers[index].bytes // max(self._units[index], 1)

    def fill_buffer(self, index: int) -> int:
        """Return the bits of all pieces of a buffer."""
        return (1 << self._count_pieces(index)) - 1

    def take_access(self, access: _Access) -> None:
        """Hold what is written, or raise PlanError where what is read is not there."""
        index = access.buffer
        own, there = self._buffers[index], self.held.get(index, 0)
        if own.kind in _ALWAYS:
            return
        bits = self._set_bits(access)
        if not access.writes:
            if bits & ~there:
                raise PlanError(
                    f"it reads {access.run} bytes at {access.begin} of its {own.kind} buffer {index}, which no step wrote before"
                )
            return
        for other in list(self.held) if own.kind == "arena" else ():  # it ends what they held in its place
            each = self._buffers[other]
            meets = each.offset < own.offset + own.bytes and own.offset < each.offset + each.bytes
            if other != index and each.kind == "arena" and meets:
                del self.held[other]
        self.held[index] = there | bits

    def _set_bits(self, access: _Access) -> int:
        size = max(self._units[access.buffer], 1)
        bits = ((1 << access.run // size) - 1) << access.begin // size
        for count, distance in access.repeats:
            done = 1
            while done < count:
                more = min(done, count - done)
                bits |= bits << more * (distance // size)
                done += more
        return bits
