# SPDX-License-Identifier: Apache-2.0
"""Rows of tables, and tensors that are repeated, joined, copied or converted.

Each function returns False where a Map cannot compute the node.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..steps.steps import Select
from .builder import PlanBuilder, arguments, option
from .fusion import FLOATS, REGISTER_DTYPES, KnownValue, Pending, StoredValue
from .join import Join
from .pointwise import COPIES, aten


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
    if builder.fake(index).dtype not in (torch.int32, torch.int64) or builder.fake(node).numel() == 0:
        return False
    table, numbers = builder.stored(source), builder.stored(index)
    if not numbers.layout.is_contiguous():
        if numbers.layout.dtype not in REGISTER_DTYPES:
            return False
        numbers = builder.contiguous_copy(numbers)
    if not table.layout.is_contiguous():
        if table.memory.kind == "tensor" or table.layout.dtype not in REGISTER_DTYPES:
            return False
        table = builder.contiguous_copy(table)
    output = builder.allocate_like(node)
    operands = (table.as_operand(), numbers.as_operand(), output.as_operand())
    wraps, of_live = node.target is aten.index.Tensor, numbers.memory in builder.of_live
    builder.steps.append(Select(*operands, dim % builder.fake(source).dim(), wraps, of_live))
    builder.values[node] = output
    return True


def lower_repeat(builder: PlanBuilder, node: Node) -> bool:
    """Lower `repeat_interleave` by a number along a dimension."""
    source, repeats = arguments(node)[:2]
    dim = option(node, 2, "dim")
    value = builder.stored(source)
    if not isinstance(repeats, int) or dim is None or value.layout.dtype not in REGISTER_DTYPES:
        return False
    after = dim % value.layout.dim() + 1
    sizes = [-1] * (value.layout.dim() + 1)
    sizes[after] = repeats
    copied = builder.contiguous_copy(StoredValue(value.memory, value.layout.unsqueeze(after).expand(sizes)))
    builder.values[node] = StoredValue(copied.memory, copied.layout.flatten(after - 1, after))
    return True


def lower_tiled(builder: PlanBuilder, node: Node) -> bool:
    """Lower `repeat`: all elements so many times along each dimension."""
    source, counts = arguments(node)
    value = builder.stored(source)
    if value.layout.dtype not in REGISTER_DTYPES or 0 in counts:
        return False
    sizes = (1,) * (len(counts) - value.layout.dim()) + tuple(value.layout.shape)
    apart = value.layout.view([each for size in sizes for each in (1, size)])
    whole = apart.expand([each for pair in zip(counts, sizes, strict=True) for each in pair])
    copied = builder.contiguous_copy(StoredValue(value.memory, whole))
    builder.values[node] = StoredValue(copied.memory, copied.layout.view(builder.fake(node).shape))
    return True


def lower_cat(builder: PlanBuilder, node: Node) -> bool:
    """Write each part to its place, in the group that computes it where it is in one."""
    parts = list(arguments(node)[0])
    dim = option(node, 1, "dim", 0)
    fake = builder.fake(node)
    dtypes = {builder.fake(part).dtype for part in parts}
    if fake.dtype not in REGISTER_DTYPES or not (dtypes == {fake.dtype} or dtypes <= {*FLOATS}):
        return False
    output = builder.allocate_wide(node, fake.shape)
    start = 0
    for part in parts:
        shape = builder.fake(part).shape
        if node.target is aten.stack.default:
            place, size = output.layout.select(dim, start), 1
        elif len(shape) != fake.dim() or 0 in shape:
            continue  # torch allows parts without elements
        else:
            place, size = output.layout.narrow(dim, start, shape[dim]), shape[dim]
        start += size
        store_value(builder, part, StoredValue(output.memory, place))
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
    store_value(builder, source, place)
    builder.complete_buffer(place.memory)
    builder.values[node] = place
    return True


def store_value(builder: PlanBuilder, source: Node, place: StoredValue) -> None:
    """Write a node's value to a place of its shape, in the group that computes it where it is in one."""
    value = builder.values[source]
    if isinstance(value, Pending) and not value.group.closed:
        value.group.store_register(value.register, place, rows=value.rows)
        return
    join = Join(builder, source, [source])
    join.group.store_register(join.register(source), place, rows=False)


def lower_conversion(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    before, after = builder.fake(source).dtype, builder.fake(node).dtype
    if before == after:
        builder.share(node, source)
        return True
    # What int64 holds is known to fit where it is made int32.
    readable = before in (*REGISTER_DTYPES, torch.int8) or (before == torch.int64 and after == torch.int32)
    value = builder.values[source]
    if not readable or after not in REGISTER_DTYPES or isinstance(value, KnownValue):
        return False
    # A step may have left it in float32, where that or what Maps take unrounded is asked for.
    is_wide = isinstance(value, StoredValue) and value.memory.kind == "arena" and value.layout.dtype == torch.float32
    taken = after == torch.float32 or builder.is_wide(node)
    if is_wide and taken and not builder.written:
        builder.values[node] = value
        return True
    join = Join(builder, node, [source])
    register = join.register(source)
    if after == torch.bool:
        op: str | None = "to_bool" if before in FLOATS else "ito_bool"
    else:
        op = None if (before in FLOATS) == (after in FLOATS) else "to_float" if after in FLOATS else "to_int"
    return join.finish(join.compute(op, register) if op else register)


def lower_clone(builder: PlanBuilder, node: Node) -> bool:
    """Lower a contiguous copy, made if need be."""
    source = arguments(node)[0]
    value = builder.values[source]
    copied = node.target in COPIES or not builder.fake(source).is_contiguous()
    apart = copied and bool(builder.written)
    if apart or (isinstance(value, StoredValue) and not value.layout.is_contiguous()):
        if isinstance(value, KnownValue):
            return False
        join = Join(builder, node, [source])
        return join.finish(join.register(source))
    builder.share(node, source)
    return True
