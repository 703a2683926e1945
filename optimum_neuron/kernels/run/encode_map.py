# SPDX-License-Identifier: Apache-2.0
"""A Map as the words that native/plan/plan.cpp reads. Its operands and registers are checked here, and only here.

A register holds whole rows or one element of each, as the last item that wrote it leaves it; an operator reads as many elements
of a register as it takes, whatever the register has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from ..steps.access import TYPES, PlanError, check_operand, float_bits, require
from ..steps.operands import Buffer, Operand
from ..steps.steps import OPS, REDUCTIONS, Item, Map
from .encode_products import OperandWords


_LOADED = TYPES | {"int8": 6}  # codes that were looked up
_MAX_DIMS = 8
# Elements times operators, so that nothing that native/map/map.cpp makes of them leaves 64 bits, nor its tasks the 40 of native/common/pool.cpp.
_MAX_WORK = 1 << 48
_MOVES = ("load", "store")  # what has an access
_OF_TWO = frozenset(OPS[OPS.index("add") : OPS.index("where")])
_OPERANDS = {"load": 0, "where": 3}  # of others that are not of two, one
_EXTENT = {False: "whole rows", True: "an element of each row"}


def encode_map(words: OperandWords, step: Map) -> Iterator[int]:
    """Yield the words of a Map.

    Raises:
        PlanError: an operator would read or write outside of its buffers or registers, or what no operator has written.
    """
    work = step.rows * step.columns * len(step.items)
    require(step.rows > 0 and step.columns > 0 and work > 0, "it has a map without elements")
    require(work <= _MAX_WORK, f"it has a map of {work} elements and operators")
    fits = 0 < step.registers <= len(step.items)
    require(fits, f"it has a map of {step.registers} registers and {len(step.items)} operators")
    whole = step.tokens is None or step.rows % step.tokens.count == 0 or not step.needs_rows
    require(whole, "it has a map with tokens that share rows")
    yield from (step.rows, step.columns, step.needs_rows, step.registers, len(step.items))
    registers: dict[int, bool] = {}
    for item in step.items:
        yield from _encode_item(item, step, registers)
        if item.access is not None:
            yield from _encode_access(item, item.access, step, words.buffers)
        if item.op != "store":
            registers[item.to] = item.rows


def count_map_tokens(step: Map) -> int:
    """Return the number of tokens that a Map computes one by one; 0 where its accesses do not say."""
    shapes = {item.access.shape[:1] for item in step.items if item.access is not None}
    return shapes.pop()[0] if len(shapes) == 1 and () not in shapes else 0


def _encode_item(item: Item, step: Map, registers: dict[int, bool]) -> Iterator[int]:
    """Yield the words of an item but for its access; `registers` are written, with an element of each row where they say so."""
    _check_form(item, step)
    takes, leaves = _find_extents(item)
    require(item.rows == leaves, f"it has {item.op!r} that gives {_EXTENT[item.rows]} instead of {_EXTENT[leaves]}")
    places, constants = [0, 0, 0], [0, 0]
    for index, (value, is_constant) in enumerate(zip(item.operands, item.constants, strict=True)):
        if is_constant:
            of_integers = (item.op.startswith("i") and item.op != "isnan") or item.op == "where"
            is_whole = of_integers and isinstance(value, int)
            constants[index] = int(value) & 0xFFFFFFFF if is_whole else float_bits(value)
            continue
        holds = registers.get(value) if isinstance(value, int) else None
        if holds is None:
            raise PlanError("it reads a register before it is written")
        require(value != item.to, "it overwrites an operand")
        require(holds == takes, f"it has {item.op!r} of {_EXTENT[holds]} instead of {_EXTENT[takes]}")
        places[index] = int(value)
    first, second, *_ = *item.constants, False, False
    yield from (OPS.index(item.op), 2 * first + second, item.rows, item.to, *places, *constants)


def _check_form(item: Item, step: Map) -> None:
    """Check that an item has what its operator asks for, whatever its registers hold."""
    require(item.op in OPS, f"it has an operator {item.op!r}")
    require(item.op != "rotate_half" or step.columns % 2 == 0, "it has rows without halves")
    exists = item.to == -1 if item.op == "store" else 0 <= item.to < step.registers
    require(exists, "it has no such register")
    require((item.access is not None) == (item.op in _MOVES), f"it has {item.op!r} with an access, or without its own")
    count = 2 if item.op in _OF_TWO else _OPERANDS.get(item.op, 1)
    fits = len(item.operands) == len(item.constants) == count
    require(fits, f"it has {item.op!r} of {len(item.operands)} operands, where {count} belong")
    fixed = [index for index, is_constant in enumerate(item.constants) if is_constant]
    require(not fixed or (count > 1 and fixed[-1] < 2), "it has a constant where a register belongs")
    require(count == 0 or len(fixed) < count, "it has an operator without operands")
    if item.op == "ifloor_div":  # by 0, or the least number by -1, it would end the process
        by = item.operands[1]
        positive = fixed == [1] and isinstance(by, int) and 0 < by < 1 << 31
        require(positive, "it divides whole numbers by what may be no number above 0")


def _find_extents(item: Item) -> tuple[bool, bool]:
    """Return whether an operator takes, and gives, an element of each row rather than whole rows."""
    if item.op in REDUCTIONS:
        return False, True
    if item.op in ("spread", "rotate_half"):
        return item.op == "spread", False
    return item.rows, item.rows


def _encode_access(item: Item, access: Operand, step: Map, buffers: Sequence[Buffer]) -> Iterator[int]:
    check_operand(access, buffers)
    types = _LOADED if item.op == "load" else TYPES
    require(access.dtype in types, "it has an operand that no kernel takes")
    count = step.rows if item.rows else step.rows * step.columns
    require(math.prod(access.shape) == count, "it has an access of another size")
    dims = _collapse_dims(access.shape, access.strides)
    require(len(dims) <= _MAX_DIMS, "it has an access with too many dimensions")
    yield from (access.buffer, types[access.dtype], access.offset, len(dims), *chain(*dims))


def _collapse_dims(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return the fewest sizes and strides that visit the same elements in the same order."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims or [(1, 1)]
