# SPDX-License-Identifier: Apache-2.0
"""Rows of tables, repeated, joined and copied tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..steps.steps import Operand, Select
from .builder import PlanBuilder, arguments
from .fusion import REGISTER_DTYPES, Pending
from .join import Join
from .operands import whole_operand
from .pointwise import aten
from .values import StoredValue


def lower_select(builder: PlanBuilder, node: Node) -> bool:
    """Lower rows of a table, by `embedding`, `index_select`, or `x[:, ..., index]`."""
    if node.target is aten.embedding.default:
        source, index, dim = arguments(node)[0], arguments(node)[1], 0
    elif node.target is aten.index_select.default:
        source, dim, index = arguments(node)
    else:
        source, indices = arguments(node)
        chosen = [place for place, each in enumerate(indices) if each is not None]
        if len(chosen) != 1:
            return False
        dim, index = chosen[0], indices[chosen[0]]
    assert isinstance(source, Node) and isinstance(index, Node)
    if builder.fake(index).dtype not in (torch.int32, torch.int64) or builder.fake(node).numel() == 0:
        return False
    dim %= builder.fake(source).dim()
    table, numbers = builder.stored(source), _contiguous_or_none(builder, index)
    if numbers is None:
        return False
    if not table.layout.is_contiguous():
        if table.memory.kind == "tensor" or table.layout.dtype not in REGISTER_DTYPES:
            return False
        table = builder.contiguous_copy(table)
    output = builder.allocate_like(node)
    of_live = builder.memories[numbers.buffer] in builder.of_live
    builder.emit(
        Select(whole_operand(table), numbers, whole_operand(output), dim, node.target is aten.index.Tensor, of_live)
    )
    builder.values[node] = output
    return True


def _contiguous_or_none(builder: PlanBuilder, node: Node) -> Operand | None:
    value = builder.stored(node)
    if value.layout.is_contiguous():
        return whole_operand(value)
    return whole_operand(builder.contiguous_copy(value)) if value.layout.dtype in REGISTER_DTYPES else None


def lower_repeat(builder: PlanBuilder, node: Node) -> bool:
    """Lower `repeat_interleave` by a number along a dimension."""
    source, repeats, *rest = arguments(node)
    dim: Any = rest[0] if rest else node.kwargs.get("dim")
    value = builder.stored(source)
    if not isinstance(repeats, int) or dim is None or value.layout.dtype not in REGISTER_DTYPES:
        return False
    after = dim % value.layout.dim() + 1
    sizes = [-1] * (value.layout.dim() + 1)
    sizes[after] = repeats
    copied = builder.contiguous_copy(StoredValue(value.memory, value.layout.unsqueeze(after).expand(sizes)))
    builder.values[node] = StoredValue(copied.memory, copied.layout.flatten(after - 1, after))
    return True


def lower_cat(builder: PlanBuilder, node: Node) -> bool:
    """Write each part to its place, in the group that computes it where it is in one."""
    parts = list(arguments(node)[0])
    dim: Any = arguments(node)[1] if len(arguments(node)) > 1 else node.kwargs.get("dim", 0)
    fake = builder.fake(node)
    dtypes = {builder.fake(part).dtype for part in parts}
    if dtypes != {fake.dtype} or fake.dtype not in REGISTER_DTYPES:
        return False
    wide = builder.uses.are_wide(node, builder.values)
    output = builder.allocate(fake.shape, torch.float32 if wide else fake.dtype)
    start = 0
    for part in parts:
        shape = builder.fake(part).shape
        if node.target is aten.stack.default:
            place = output.layout.select(dim, start)
            start += 1
        else:
            if len(shape) != fake.dim() or 0 in shape:
                continue  # torch allows parts without elements
            place = output.layout.narrow(dim, start, shape[dim])
            start += shape[dim]
        store_value(builder, part, output, place)
    builder.values[node] = output
    return True


def lower_copy(builder: PlanBuilder, node: Node) -> bool:
    """Write one tensor over another."""
    target, source = arguments(node)[:2]
    place = builder.resting(target)
    fakes = [builder.fake(each) for each in (target, source)]
    alike = fakes[0].shape == fakes[1].shape and fakes[0].dtype == fakes[1].dtype
    if not alike or fakes[0].dtype not in REGISTER_DTYPES or place.memory.kind not in ("arena", "tensor"):
        return False
    builder.before_writing(place.memory)
    store_value(builder, source, place, place.layout)
    builder.complete_buffer(place.memory)
    builder.values[node] = place
    return True


def store_value(builder: PlanBuilder, source: Node, output: StoredValue, place: Tensor) -> None:
    """Write a node's value to a place of its shape in a buffer, in the group that computes it where it is in one."""
    value = builder.values[source]
    if isinstance(value, Pending) and not value.group.closed:
        value.group.store_register(value.register, output.memory, place, rows=value.rows)
        return
    join = Join(builder, source, [source])
    join.group.store_register(join.register(source), output.memory, place, rows=False)
