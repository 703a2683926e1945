# SPDX-License-Identifier: Apache-2.0
"""Operands of kernels, which take some layouts and not others."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from ..steps.steps import Operand
from .builder import PlanBuilder
from .values import StoredValue, operand


def even_rows(builder: PlanBuilder, node: Node) -> StoredValue:
    """Return a node's value as rows at equal distances, with adjacent elements in a row: copied where it is not."""
    value = builder.stored(node)
    return value if row_stride(value.layout) is not None else builder.contiguous_copy(value)


def row_stride(layout: Tensor) -> int | None:
    """Return the elements from a row to the next, where all dimensions but the last count as one; else None."""
    if layout.shape[-1] > 1 and layout.stride(-1) != 1:
        return None
    stride, span = None, 0
    for size, own in reversed(list(zip(layout.shape[:-1], layout.stride()[:-1], strict=True))):
        if size == 1:
            continue
        if stride is None:
            stride, span = own, own * size
        elif own != span:
            return None
        else:
            span = own * size
    return layout.shape[-1] if stride is None else stride


def rows_operand(value: StoredValue) -> Operand:
    """Return a value with a row_stride() as `[rows, elements]`."""
    layout = value.layout
    stride = row_stride(layout)
    assert stride is not None
    rows = layout.numel() // layout.shape[-1]
    place = operand(value.memory, layout)
    return Operand(place.buffer, place.dtype, place.offset, (rows, layout.shape[-1]), (stride, 1))


def whole_operand(value: StoredValue) -> Operand:
    """Return all of a value, as it lies."""
    return operand(value.memory, value.layout)


def contiguous_operand(builder: PlanBuilder, node: Node) -> Operand:
    """Return a node's value as a contiguous operand, copied where it is not."""
    value = builder.stored(node)
    return whole_operand(value if value.layout.is_contiguous() else builder.contiguous_copy(value))


def optional_operand(builder: PlanBuilder, node: Node | None) -> Operand | None:
    """Return None, or as `contiguous_operand`."""
    return None if node is None else contiguous_operand(builder, node)


def adjacent_operand(builder: PlanBuilder, node: Node) -> Operand:
    """Return a node's value, with adjacent elements in its last dimension: copied where they are not."""
    value = builder.stored(node)
    return whole_operand(value if value.layout.stride(-1) == 1 else builder.contiguous_copy(value))
