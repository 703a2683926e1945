# SPDX-License-Identifier: Apache-2.0
"""Places of buffers in the arena: those that are never needed at once may share one.

A Map may write a buffer in the place of another: a core need not fetch again what it has just read.
"""

from __future__ import annotations

from torch import Tensor

from ..plan import Plan
from ..run.encode_products import is_contiguous
from ..steps.access import ALIGNMENT, SIZES, find_operands
from ..steps.operands import Buffer
from ..steps.steps import Item, Map, Step
from .builder import PlanBuilder


def place_buffers(builder: PlanBuilder, once: tuple[Step, ...]) -> tuple[Plan, dict[str, Tensor]]:
    """Return the finished plan, and its constants by name."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, step in enumerate(builder.steps):
        for index in buffers_of(step):
            first.setdefault(index, number)
            last[index] = number
    used = {index for step in once for index in buffers_of(step)} | first.keys()
    used |= {memory.index for memory in builder.memories if memory.kind in ("input", "output")}
    offsets, arena = _find_offsets(builder, first, last)
    buffers = tuple(
        Buffer(memory.kind, memory.name, memory.bytes if memory.index in used else 0, offsets.get(memory.index, 0))
        for memory in builder.memories
    )
    return Plan(buffers, once, tuple(builder.steps), arena), builder.constants


def _find_offsets(builder: PlanBuilder, first: dict[int, int], last: dict[int, int]) -> tuple[dict[int, int], int]:
    """Return the lowest free place of each buffer, in order of their first use, and the arena's size."""
    offsets: dict[int, int] = {}
    taken: list[tuple[int, int, int]] = []  # offset, end, last use
    replaced: set[int] = set()
    size = 0
    for index in sorted(first, key=lambda index: first[index]):
        memory = builder.memories[index]
        if memory.kind != "arena":
            continue
        taken = [each for each in taken if each[2] >= first[index]]
        needed = -(-max(memory.bytes, 1) // ALIGNMENT) * ALIGNMENT
        # The step that first writes this buffer is the last to read those that it can replace.
        left = [
            each
            for each in list_replaceable(builder.steps[first[index]], index)
            if last[each] == first[index] and builder.memories[each].bytes == memory.bytes
            if each in offsets and each not in replaced
        ]
        replaced.update(left[:1])
        start = offsets[left[0]] if left else 0
        for begin, end, _ in () if left else sorted(taken):
            if begin - start >= needed:
                break
            start = max(start, end)
        offsets[index] = start
        taken.append((start, start + needed, last[index]))
        size = max(size, start + needed)
    return offsets, size


def buffers_of(step: Step) -> set[int]:
    return {each.buffer for each in find_operands(step)}


def list_replaceable(step: Step, buffer: int) -> list[int]:
    """List the buffers that a step reads element by element, each before it writes the same element of `buffer`."""
    if not isinstance(step, Map):
        return []
    accessed = [item.access.buffer for item in step.items if item.access]
    stores = [index for index, item in enumerate(step.items) if item.access and item.access.buffer == buffer]
    if len(stores) != 1 or step.items[stores[0]].op != "store":
        return []
    own = _size_in_order(step.items[stores[0]])
    return [
        item.access.buffer
        for index, item in enumerate(step.items[: stores[0]])
        if item.access and item.op == "load" and own and _size_in_order(item) == own
        if accessed.count(item.access.buffer) == 1 and _find_last_read(step.items, index) < stores[0]
    ]


def _size_in_order(item: Item) -> int | None:
    """Return the bytes of an element, where all elements lie in order from the buffer's begin."""
    access = item.access
    in_order = access and not item.rows and not access.offset and is_contiguous(access)
    return SIZES.get(access.dtype) if access and in_order else None


def _find_last_read(items: tuple[Item, ...], load: int) -> int:
    """Return the last item that reads a loaded register, which may be read where it was loaded from."""
    last = load
    for index, item in enumerate(items[load + 1 :], load + 1):
        operands = zip(item.operands, item.constants, strict=True)
        if any(not constant and value == items[load].to for value, constant in operands):
            last = index
        if item.to == items[load].to:
            break
    return last
