# SPDX-License-Identifier: Apache-2.0
"""Which buffer a Map may write in the place of another: what a core has just read, it need not fetch again to write to."""

from __future__ import annotations

import math

from .access import SIZES
from .program import Item, Map, Operand, Step


def replaceable(step: Step, buffer: int) -> list[int]:
    """Buffers that a step reads element by element, each before it writes the same element of `buffer`."""
    if not isinstance(step, Map):
        return []
    stores = [index for index, item in enumerate(step.items) if item.access and item.access.buffer == buffer]
    if len(stores) != 1 or step.items[stores[0]].op != "store":
        return []
    own = _size_in_order(step.items[stores[0]])
    return [
        item.access.buffer
        for index, item in enumerate(step.items[: stores[0]])
        if item.access
        and item.op == "load"
        and own is not None
        and _size_in_order(item) == own
        and _accesses(step, item.access.buffer) == 1
        and _last_read(step.items, index) < stores[0]
    ]


def _size_in_order(item: Item) -> int | None:
    """Bytes of an element, where all that the Map computes lie one behind another from the buffer's begin."""
    access = item.access
    in_order = access is not None and not item.rows and not access.offset and _is_contiguous(access)
    return SIZES.get(access.dtype) if access is not None and in_order else None


def _is_contiguous(access: Operand) -> bool:
    expected = [math.prod(access.shape[dim + 1 :]) for dim in range(len(access.shape))]
    return all(
        size == 1 or stride == whole
        for size, stride, whole in zip(access.shape, access.strides, expected, strict=True)
    )


def _accesses(step: Map, buffer: int) -> int:
    return sum(item.access is not None and item.access.buffer == buffer for item in step.items)


def _last_read(items: tuple[Item, ...], load: int) -> int:
    """The last item that reads a loaded register, which may be read where it was loaded from."""
    last = load
    for index, item in enumerate(items[load + 1 :], load + 1):
        operands = zip(item.operands, item.constants, strict=True)
        if any(not constant and value == items[load].to for value, constant in operands):
            last = index
        if item.to == items[load].to:
            break
    return last
