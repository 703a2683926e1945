# SPDX-License-Identifier: Apache-2.0
"""Checks of operands against their buffers, and of numbers against their types. Imports no torch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from .steps import Buffer, Operand


# As in native/common/kernels.h.
TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "int32": 3, "int64": 4, "bool": 5}
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8, "bool": 1}
# Also the types that calls of torch and quantized weights have.
ALL_SIZES = SIZES | {
    "complex64": 8,
    "complex128": 16,
    "float64": 8,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
}
ALIGNMENT = 64  # bytes of a cache line
# What the kernel of attention takes: dimensions of heads, and columns at a time, which lie in one block. kBlock of
# native/attention/attention_call.h is the latter.
HEAD_DIM_STEP, HEAD_DIM_LIMIT, COLUMN_BLOCK = 16, 256, 64
_LARGEST = 1 << 48


class PlanError(ValueError):
    """An error in a plan: its parts contradict each other."""


def require(holds: bool, otherwise: str) -> None:
    """Raise PlanError with the text `otherwise` where something does not hold."""
    if not holds:
        raise PlanError(otherwise)


def check_size(number: int) -> None:
    """Raise PlanError where native code cannot count so many bytes or elements."""
    require(0 <= number <= _LARGEST, f"it has the size {number}, which is not within 0 and {_LARGEST}")


def item_size(dtype: str) -> int:
    """Return the bytes of an element; raise PlanError for a type that plans do not have."""
    size = ALL_SIZES.get(dtype)
    if size is None:
        raise PlanError(f"it uses the type {dtype}")
    return size


def check_operand(operand: Operand, buffers: Sequence[Buffer]) -> None:
    """Raise PlanError where an operand leaves its buffer."""
    if not 0 <= operand.buffer < len(buffers):
        raise PlanError(f"it has {len(buffers)} buffers, and uses number {operand.buffer}")
    size = item_size(operand.dtype)
    if len(operand.shape) != len(operand.strides):
        raise PlanError(f"it has an operand of {len(operand.shape)} dimensions with {len(operand.strides)} strides")
    numbers = (operand.offset, *operand.shape, *operand.strides)
    if min(numbers) < 0 or max(numbers) > _LARGEST:
        raise PlanError(
            f"it has an operand of shape {list(operand.shape)} at {operand.offset}, by {list(operand.strides)}"
        )
    if 0 in operand.shape:
        return
    reach = sum((count - 1) * stride for count, stride in zip(operand.shape, operand.strides, strict=True))
    end = (operand.offset + reach + 1) * size
    buffer = buffers[operand.buffer]
    if end > buffer.bytes:
        raise PlanError(f"it reads or writes up to byte {end} of a buffer of {buffer.bytes} bytes")


def float_bits(number: Any) -> int:
    """Return a number as the bits of a float32; raise PlanError where it is none."""
    try:
        return int(struct.unpack("<I", struct.pack("<f", number))[0])
    except (struct.error, OverflowError) as error:
        raise PlanError(f"it has the constant {number!r}, which is no float32") from error
