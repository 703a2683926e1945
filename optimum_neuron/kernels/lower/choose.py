# SPDX-License-Identifier: Apache-2.0
"""Elements of rows by number: the largest, those that an index names, and those that get a value."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..steps.operands import Operand
from ..steps.steps import Gather, Scatter, TopK
from .builder import PlanBuilder, arguments, option
from .fusion import FLOATS, REGISTER_DTYPES, StoredValue
from .pointwise import aten


# Values and their columns. The largest of all is the only one of `max`.
LARGEST = frozenset((aten.topk.default, aten.max.dim))
SCATTERS = frozenset((aten.scatter.value, aten.scatter.src))
BY_NUMBER = SCATTERS | {aten.gather.default}


def finds_largest(node: Node) -> bool:
    """Return whether a node has the largest of each row's last dimension, in order, which serves where any order does."""
    if node.target not in LARGEST:
        return False
    is_topk = node.target is aten.topk.default
    dim = option(node, 2, "dim", -1) if is_topk else arguments(node)[1]
    source, columns = arguments(node)[0].meta["val"], node.meta["val"][1]
    is_last = source.dim() > 0 and dim in (-1, source.dim() - 1)
    is_largest = not is_topk or option(node, 3, "largest", True)
    return is_last and is_largest and source.dtype in FLOATS and columns.numel() > 0


def takes_rows(node: Node) -> bool:
    """Return whether a node's index names elements of one dimension of its first operand, and has the others whole."""
    source, dim, index = arguments(node)[:3]
    fake, numbers = source.meta["val"], index.meta["val"]
    if fake.dim() != numbers.dim() or 0 in (fake.dim(), fake.numel(), numbers.numel()):
        return False
    taken = REGISTER_DTYPES if node.target in SCATTERS else (*REGISTER_DTYPES, torch.int64)
    return fake.dtype in taken and fake.select(dim, 0).shape == numbers.select(dim, 0).shape


def lower_largest(builder: PlanBuilder, node: Node) -> bool:
    """Lower what `finds_largest`; return False where its columns stay int64."""
    fakes = node.meta["val"]
    if not finds_largest(node) or fakes[1].dtype != torch.int32:
        return False
    value = builder.contiguous(arguments(node)[0], torch.float32)
    k = option(node, 1, "k") if node.target is aten.topk.default else 1
    shape = (*value.layout.shape[:-1], k)
    found = [builder.allocate(shape, dtype) for dtype in (torch.float32, torch.int32)]
    rows, values, columns = map(_as_rows, (value, *found))
    builder.steps.append(TopK(rows, values, columns))
    found[0] = _convert(builder, found[0], fakes[0].dtype)
    builder.values[node] = [
        StoredValue(each.memory, each.layout.view(fake.shape)) for each, fake in zip(found, fakes, strict=True)
    ]
    return True


def lower_gather(builder: PlanBuilder, node: Node) -> bool:
    """Lower elements of a dimension by number; return False where kernels cannot take them."""
    source, dim, index = arguments(node)[:3]
    if not takes_rows(node) or builder.fake(index).dtype != torch.int32:
        return False
    table = builder.stored(source)
    rows = StoredValue(table.memory, table.layout.movedim(dim, -1))
    if not rows.layout.is_contiguous():
        if rows.layout.dtype not in REGISTER_DTYPES:
            return False
        rows = builder.contiguous_copy(rows)
    numbers = _move_last(builder, index, dim, torch.int32)
    output = builder.allocate(numbers.layout.shape, rows.layout.dtype)
    builder.steps.append(Gather(_as_rows(rows), _as_rows(numbers), _as_rows(output)))
    builder.values[node] = StoredValue(output.memory, output.layout.movedim(-1, dim))
    return True


def lower_scatter(builder: PlanBuilder, node: Node) -> bool:
    """Lower a number, or values of a tensor, at elements of a dimension by number; return False as `lower_gather`."""
    source, dim, index, given = arguments(node)[:4]
    if not takes_rows(node) or builder.fake(index).dtype != torch.int32 or node.kwargs:
        return False
    if isinstance(given, Node) and builder.fake(given).shape != builder.fake(index).shape:
        return False
    own = builder.fake(source).dtype
    dtype = torch.float32 if own in FLOATS else own
    values = _as_rows(_move_last(builder, given, dim, dtype)) if isinstance(given, Node) else None
    rows, numbers = _move_last(builder, source, dim, dtype), _move_last(builder, index, dim, torch.int32)
    output = builder.allocate(rows.layout.shape, dtype)
    places = _as_rows(rows), _as_rows(numbers), _as_rows(output)
    builder.steps.append(Scatter(*places, values, 0.0 if values else float(given)))
    output = _convert(builder, output, own)
    builder.values[node] = StoredValue(output.memory, output.layout.movedim(-1, dim))
    return True


def _move_last(builder: PlanBuilder, node: Node, dim: int, dtype: torch.dtype) -> StoredValue:
    """Return a node's value in memory, contiguous and of a type, with a dimension as its last."""
    value = builder.stored(node)
    moved = StoredValue(value.memory, value.layout.movedim(dim, -1))
    fits = moved.layout.is_contiguous() and moved.layout.dtype == dtype
    return moved if fits else builder.contiguous_copy(moved, dtype)


def _convert(builder: PlanBuilder, value: StoredValue, dtype: torch.dtype) -> StoredValue:
    return value if value.layout.dtype == dtype else builder.contiguous_copy(value, dtype)


def _as_rows(value: StoredValue) -> Operand:
    """Return a contiguous value without first dimensions of one element, so that the first one counts tokens."""
    layout = value.layout
    while layout.dim() > 2 and layout.shape[0] == 1:
        layout = layout[0]
    return StoredValue(value.memory, layout).as_operand()
