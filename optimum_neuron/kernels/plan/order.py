# SPDX-License-Identifier: Apache-2.0
"""A plan reads what is there: weights, states, a run's inputs, and what its earlier steps wrote. Imports no torch.

Buffers of the arena share places. So a write to one of them ends what the others held there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .access import PlanError, item_size, require
from .effects import accesses
from .program import Buffer, Operand, Plan, Step


_ALWAYS = ("tensor", "constant")
# Pieces of all buffers together: more take too long to follow. Plans of large models have some thousands.
_MOST_PIECES = 1 << 31


class _Place(NamedTuple):
    """Bytes of an operand in its buffer: a run from `begin` on, and its repetitions, each a count and a distance."""

    begin: int
    run: int
    repeats: tuple[tuple[int, int], ...]


class _Access(NamedTuple):
    buffer: int
    place: _Place
    writes: bool


def check_order(plan: Plan) -> None:
    """Check that each step reads what is there, and that the steps write all outputs.

    Args:
        plan: its operands lie in their buffers.

    Raises:
        PlanError: a step reads what no earlier step wrote or a later buffer replaced, or an output is not written whole.
    """
    once, steps = _accesses(plan.once), _accesses(plan.steps)
    memory = _Memory(plan.buffers, (each for step in (*once, *steps) for each in step))
    for step in once:
        memory.run(step)
    memory.fill("input")
    for step in steps:
        memory.run(step)
    for index, buffer in enumerate(plan.buffers):
        require(buffer.kind != "output" or memory.is_whole(index), f"it does not write all of output {buffer.name}")


def _accesses(steps: Iterable[Step]) -> list[list[_Access]]:
    return [[_Access(each.buffer, _place(each), writes) for each, writes in accesses(step)] for step in steps]


def _place(operand: Operand) -> _Place:
    size = run = item_size(operand.dtype)
    if 0 in operand.shape:
        return _Place(0, 0, ())
    repeats: list[tuple[int, int]] = []
    for stride, count in sorted(zip(operand.strides, operand.shape, strict=True)):
        if count > 1 and stride * size == run and not repeats:
            run *= count
        elif count > 1 and stride:
            repeats.append((count, stride * size))
    return _Place(operand.offset * size, run, tuple(repeats))


class _Memory:
    """What the buffers hold, each as a number with a bit for each piece. All places begin and end between pieces."""

    def __init__(self, buffers: Sequence[Buffer], found: Iterable[_Access]) -> None:
        self._buffers = buffers
        self._units = [buffer.bytes for buffer in buffers]
        for each in found:
            distances = (distance for _, distance in each.place.repeats)
            self._units[each.buffer] = math.gcd(self._units[each.buffer], each.place.begin, each.place.run, *distances)
        pieces = sum(self._pieces(index) for index, buffer in enumerate(buffers) if buffer.kind not in _ALWAYS)
        require(pieces <= _MOST_PIECES, f"it takes its memory in {pieces} pieces, and may in {_MOST_PIECES}")
        self._held: dict[int, int] = {}

    def _pieces(self, index: int) -> int:
        return self._buffers[index].bytes // max(self._units[index], 1)

    def fill(self, kind: str) -> None:
        """Write all buffers of a kind."""
        for index, buffer in enumerate(self._buffers):
            if buffer.kind == kind:
                self._held[index] = (1 << self._pieces(index)) - 1

    def is_whole(self, index: int) -> bool:
        """Return whether all of a buffer is written."""
        return self._held.get(index, 0) == (1 << self._pieces(index)) - 1

    def run(self, step: Iterable[_Access]) -> None:
        """Take what a step reads, and write what it writes.

        Raises:
            PlanError: it reads what is not there.
        """
        for index, place, writes in step:
            buffer = self._buffers[index]
            if buffer.kind in _ALWAYS:
                continue
            bits = self._bits(index, place)
            if writes:
                self._end_others(index)
                self._held[index] = self._held.get(index, 0) | bits
            elif bits & ~self._held.get(index, 0):
                raise PlanError(
                    f"it reads {place.run} bytes at {place.begin} of its {buffer.kind} buffer {index}, which no step wrote before"
                )

    def _end_others(self, index: int) -> None:
        """Forget what other buffers of the arena held in the place of this one."""
        own = self._buffers[index]
        if own.kind != "arena":
            return
        for other in list(self._held):
            each = self._buffers[other]
            meets = each.offset < own.offset + own.bytes and own.offset < each.offset + each.bytes
            if other != index and each.kind == "arena" and meets:
                del self._held[other]

    def _bits(self, index: int, place: _Place) -> int:
        size = max(self._units[index], 1)
        bits = ((1 << place.run // size) - 1) << place.begin // size
        for count, distance in place.repeats:
            done = 1
            while done < count:
                more = min(done, count - done)
                bits |= bits << more * (distance // size)
                done += more
        return bits
