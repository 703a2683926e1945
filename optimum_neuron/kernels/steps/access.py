# SPDX-License-Identifier: Apache-2.0
"""The operands that each step reads and writes, and checks of them against their buffers and types. Imports no torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from .operands import Buffer, Operand
from .steps import Linears, Map, Step


# As in native/common/kernels.h.
TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "int32": 3, "int64": 4, "bool": 5}
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8, "bool": 1}
# Also the types that quantized weights have.
ALL_SIZES = SIZES | dict.fromkeys(("int8", "uint8", "float8_e4m3fn"), 1)
ALIGNMENT = 64  # bytes of a cache line
# What the kernel of attention takes: dimensions of heads, and columns at a time, which lie in one block. kBlock of
# native/attention/attention_call.h is the latter.
HEAD_DIM_LIMIT, COLUMN_BLOCK = 512, 64
LARGEST = 1 << 48  # bytes or elements that native code can count


class PlanError(ValueError):
    """An error in a plan: its parts contradict each other."""


def require(holds: bool, otherwise: str) -> None:
    """Raise PlanError with the text `otherwise` where something does not hold."""
    if not holds:
        raise PlanError(otherwise)


def item_size(dtype: str) -> int:
    """Return the bytes of an element; raise PlanError for a type that plans do not have."""
    require(dtype in ALL_SIZES, f"it uses the type {dtype}")
    return ALL_SIZES[dtype]


def check_operand(operand: Operand, buffers: Sequence[Buffer]) -> None:
    """Raise PlanError where an operand leaves its buffer."""
    shape, strides = operand.shape, operand.strides
    if not 0 <= operand.buffer < len(buffers):
        raise PlanError(f"it has {len(buffers)} buffers, and uses number {operand.buffer}")
    if len(shape) != len(strides):
        raise PlanError(f"it has an operand of {len(shape)} dimensions with {len(strides)} strides")
    numbers = (operand.offset, *shape, *strides)
    if min(numbers) < 0 or max(numbers) > LARGEST:
        raise PlanError(f"it has an operand of shape {list(shape)} at {operand.offset}, by {list(strides)}")
    end, held = find_bytes(operand).stop, buffers[operand.buffer].bytes
    if end > held and 0 not in shape:
        raise PlanError(f"it reads or writes up to byte {end} of a buffer of {held} bytes")


def find_bytes(operand: Operand) -> range:
    """Return the bytes in its buffer from the first that an operand has to its last."""
    size = item_size(operand.dtype)
    reach = sum((count - 1) * stride for count, stride in zip(operand.shape, operand.strides, strict=True))
    begin = operand.offset * size
    return range(begin, begin if 0 in operand.shape else begin + (reach + 1) * size)


def float_bits(number: Any) -> int:
    """Return a number as the bits of a float32; raise PlanError where it is none."""
    try:
        return int(struct.unpack("<I", struct.pack("<f", number))[0])
    except (struct.error, OverflowError) as error:
        raise PlanError(f"it has the constant {number!r}, which is no float32") from error


def find_operands(value: Any) -> Iterator[Operand]:
    """Yield all operands in a step."""
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from find_operands(each)
    else:
        kind: Any = type(value)
        for name in _members(kind):
            member = getattr(value, name)
            if type(member) not in _LEAVES:  # most are: a call for each takes longer than all else
                yield from find_operands(member)


_LEAVES = frozenset((bool, int, float, str, type(None)))


@cache
def _members(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def list_written(step: Step) -> list[Operand]:
    """Return the operands that a step writes to."""
    if isinstance(step, Map):
        return [item.access for item in step.items if item.op == "store" and item.access is not None]
    return [*_list_changed(step), *list_outputs(step)]


def list_outputs(step: Any) -> list[Operand]:
    """Return what a step of kernels other than a Map writes whole."""
    if isinstance(step, Linears):
        return [layer.output for layer in step.layers]
    return [getattr(step, name) for name in getattr(step, "writes", ("output",)) if hasattr(step, name)]


def _list_changed(step: Step) -> list[Operand]:
    return [getattr(step, name) for name in getattr(step, "changed", ())]


def list_accesses(step: Step) -> Iterator[tuple[Operand, bool]]:
    """Yield each operand in the order in which a step takes it, and whether it writes there."""
    if isinstance(step, Map):
        yield from ((item.access, item.op == "store") for item in step.items if item.access is not None)
        return
    targets = list_written(step)
    changed = _list_changed(step)
    for each in find_operands(step):
        if not any(each is target for target in targets) or any(each is part for part in changed):
            yield each, False
    yield from ((target, True) for target in targets)
