# SPDX-License-Identifier: Apache-2.0
"""Where in the arena the buffers of a step lie: those that are never needed at once may share a place."""

from __future__ import annotations

from torch import Tensor

from ..plan.effects import operands_of
from ..plan.in_place import replaceable
from ..plan.program import Buffer, Plan, Step, TorchCall
from .builder import PlanBuilder


_ALIGNMENT = 64


def place_buffers(builder: PlanBuilder, once: tuple[TorchCall, ...]) -> tuple[Plan, dict[str, Tensor]]:
    """The finished plan, and its constants by name."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, step in enumerate(builder.steps):
        for index in buffers_of(step):
            first.setdefault(index, number)
            last[index] = number
    used = {index for step in once for index in buffers_of(step)} | first.keys()
    used |= {memory.index for memory in builder.memories if memory.kind in ("input", "output")}
    offsets, arena = _offsets(builder, first, last)
    buffers = tuple(
        Buffer(memory.kind, memory.name, memory.bytes if memory.index in used else 0, offsets.get(memory.index, 0))
        for memory in builder.memories
    )
    return Plan(buffers, once, tuple(builder.steps), arena), builder.constants


def _offsets(builder: PlanBuilder, first: dict[int, int], last: dict[int, int]) -> tuple[dict[int, int], int]:
    """The lowest free place of each buffer, in order of their first use."""
    offsets: dict[int, int] = {}
    taken: list[tuple[int, int, int]] = []  # offset, end, last use
    replaced: set[int] = set()
    size = 0
    for index in sorted(first, key=lambda index: first[index]):
        memory = builder.memories[index]
        if memory.kind != "arena":
            continue
        taken = [each for each in taken if each[2] >= first[index]]
        needed = -(-max(memory.bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        left = [each for each in _left_behind(builder, index, first, last) if each in offsets and each not in replaced]
        replaced.update(left[:1])
        start = offsets[left[0]] if left else _free_place(taken, needed)
        offsets[index] = start
        taken.append((start, start + needed, last[index]))
        size = max(size, start + needed)
    return offsets, size


def _free_place(taken: list[tuple[int, int, int]], needed: int) -> int:
    start = 0
    for begin, end, _ in sorted(taken):
        if begin - start >= needed:
            break
        start = max(start, end)
    return start


def _left_behind(builder: PlanBuilder, index: int, first: dict[int, int], last: dict[int, int]) -> list[int]:
    """Buffers that the first step that writes this one is the last to read, and can replace by it."""
    size = builder.memories[index].bytes
    candidates = replaceable(builder.steps[first[index]], index)
    return [each for each in candidates if last[each] == first[index] and builder.memories[each].bytes == size]


def buffers_of(step: Step) -> set[int]:
    return {each.buffer for each in operands_of(step)}
