# SPDX-License-Identifier: Apache-2.0
"""Values of nodes as the operands of kernels, which take some layouts and not others."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from ..plan.program import Operand
from ..plan.values import Stored, operand
from .builder import PlanBuilder


def even_rows(builder: PlanBuilder, node: Node) -> Stored:
    """A node's value as rows that lie evenly, the elements of a row side by side: copied where it is not."""
    value = builder.stored(node)
    return value if row_stride(value.layout) is not None else builder.contiguous_copy(value)


def row_stride(layout: Tensor) -> int | None:
    """Elements from a row to the next, of a tensor whose dimensions but the last are one; None where they are not."""
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


def rows_operand(value: Stored) -> Operand:
    """A value of which row_stride() is known, as `[rows, elements]`."""
    layout = value.layout
    stride = row_stride(layout)
    assert stride is not None
    rows = layout.numel() // layout.shape[-1]
    place = operand(value.memory, layout)
    return Operand(place.buffer, place.dtype, place.offset, (rows, layout.shape[-1]), (stride, 1))


def whole_operand(value: Stored) -> Operand:
    """All of a value, as it lies."""
    return operand(value.memory, value.layout)


def contiguous_operand(builder: PlanBuilder, node: Node) -> Operand:
    """A node's value, its elements side by side: copied where they are not."""
    value = builder.stored(node)
    return whole_operand(value if value.layout.is_contiguous() else builder.contiguous_copy(value))
