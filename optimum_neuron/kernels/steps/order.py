# SPDX-License-Identifier: Apache-2.0
"""The order of a plan's steps: each reads weights, states, inputs, and what earlier steps wrote. Imports no torch.

Buffers of the arena share places. So a write to one of them ends what the others held there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .access import PlanError, item_size, require
from .effects import list_accesses
from .steps import Buffer, Operand, PlanData, Step


_ALWAYS = ("tensor", "constant")
# Pieces of all buffers together: more take too long to follow. Plans of large models have some thousands.
_MOST_PIECES = 1 << 31


class _Runs(NamedTuple):
    """Bytes of an operand in its buffer: a run from `begin` on, and its repetitions, each a count and a distance."""

    begin: int
    run: int
    repeats: tuple[tuple[int, int], ...]


class _Access(NamedTuple):
    buffer: int
    runs: _Runs
    writes: bool


def check_order(plan: PlanData) -> None:
    """Check that each step reads what is there, and that the steps write all outputs.

    Args:
        plan: its operands lie in their buffers.

    Raises:
        PlanError: a step reads what no earlier step wrote or a later buffer replaced, or an output is not written whole.
    """
    first, then = _list_accesses(plan.once), _list_accesses(plan.steps)
    contents = _Contents(plan.buffers, (each for step in (*first, *then) for each in step))
    for step in first:
        contents.take_step(step)
    contents.fill("input")
    for step in then:
        contents.take_step(step)
    for index, buffer in enumerate(plan.buffers):
        require(buffer.kind != "output" or contents.is_whole(index), f"it does not write all of output {buffer.name}")


def _list_accesses(steps: Iterable[Step]) -> list[list[_Access]]:
    return [[_Access(each.buffer, _find_runs(each), writes) for each, writes in list_accesses(step)] for step in steps]


def _find_runs(operand: Operand) -> _Runs:
    size = run = item_size(operand.dtype)
    if 0 in operand.shape:
        return _Runs(0, 0, ())
    repeats: list[tuple[int, int]] = []
    for stride, count in sorted(zip(operand.strides, operand.shape, strict=True)):
        if count > 1 and stride * size == run and not repeats:
            run *= count
        elif count > 1 and stride:
            repeats.append((count, stride * size))
    return _Runs(operand.offset * size, run, tuple(repeats))


class _Contents:
    """The contents of buffers, each as a number with a bit for each piece. All places begin and end between pieces."""

    def __init__(self, buffers: Sequence[Buffer], found: Iterable[_Access]) -> None:
        self._buffers = buffers
        self._units = [buffer.bytes for buffer in buffers]
        for each in found:
            distances = (distance for _, distance in each.runs.repeats)
            self._units[each.buffer] = math.gcd(self._units[each.buffer], each.runs.begin, each.runs.run, *distances)
        pieces = sum(self._count_pieces(index) for index, buffer in enumerate(buffers) if buffer.kind not in _ALWAYS)
        require(pieces <= _MOST_PIECES, f"it takes its memory in {pieces} pieces, and may in {_MOST_PIECES}")
        self._held: dict[int, int] = {}

    def _count_pieces(self, index: int) -> int:
        return self._buffers[index].bytes // max(self._units[index], 1)

    def fill(self, kind: str) -> None:
        """Write all buffers of a kind."""
        for index, buffer in enumerate(self._buffers):
            if buffer.kind == kind:
                self._held[index] = (1 << self._count_pieces(index)) - 1

    def is_whole(self, index: int) -> bool:
        """Return whether all of a buffer is written."""
        return self._held.get(index, 0) == (1 << self._count_pieces(index)) - 1

    def take_step(self, step: Iterable[_Access]) -> None:
        """Take what a step reads, and write what it writes.

        Raises:
            PlanError: it reads what is not there.
        """
        for index, runs, writes in step:
            buffer = self._buffers[index]
            if buffer.kind in _ALWAYS:
                continue
            bits = self._set_bits(index, runs)
            if writes:
                self._forget_others(index)
                self._held[index] = self._held.get(index, 0) | bits
            elif bits & ~self._held.get(index, 0):
                raise PlanError(
                    f"it reads {runs.run} bytes at {runs.begin} of its {buffer.kind} buffer {index}, which no step wrote before"
                )

    def _forget_others(self, index: int) -> None:
        """Forget what other buffers of the arena held in the place of this one."""
        own = self._buffers[index]
        if own.kind != "arena":
            return
        for other in list(self._held):
            each = self._buffers[other]
            meets = each.offset < own.offset + own.bytes and own.offset < each.offset + each.bytes
            if other != index and each.kind == "arena" and meets:
                del self._held[other]

    def _set_bits(self, index: int, runs: _Runs) -> int:
        size = max(self._units[index], 1)
        bits = ((1 << runs.run // size) - 1) << runs.begin // size
        for count, distance in runs.repeats:
            done = 1
            while done < count:
                more = min(done, count - done)
                bits |= bits << more * (distance // size)
                done += more
        return bits
