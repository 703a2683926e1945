# SPDX-License-Identifier: Apache-2.0
"""Nodes that become calls of kernels: linear layers, attention, experts, slots' states, tables, the sampler, and joined tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..plan.program import (
    Attend,
    Convolve,
    Experts,
    Layer,
    Linears,
    Operand,
    Sample,
    Select,
    Walk,
    WriteCache,
    WriteCodes,
)
from ..plan.values import Stored
from .builder import PlanBuilder, arguments
from .fusion import REGISTER_DTYPES, Pending
from .join import Join
from .operands import contiguous_operand, even_rows, row_stride, rows_operand, whole_operand
from .pointwise import aten


_LINEAR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def lower_linear(builder: PlanBuilder, node: Node) -> bool:
    """Linear layers that share their input become one call, where the first one stands."""
    if not _is_linear(builder, node):
        return False
    x = arguments(node)[0]
    assert isinstance(x, Node)
    together = [
        user
        for user in x.users
        if user not in builder.values and _is_linear(builder, user) and arguments(user)[0] is x
    ]
    rows = rows_operand(even_rows(builder, x))
    layers = []
    for each in together:
        output = builder.allocate(builder.fake(each).shape, builder.fake(each).dtype)
        weight, bias = (_parameter(builder, each, index) for index in (1, 2))
        assert weight is not None
        layers.append(
            Layer(whole_operand(weight), None if bias is None else whole_operand(bias), rows_operand(output))
        )
        builder.values[each] = output
    builder.emit(Linears(rows, tuple(layers)))
    return True


def lower_matmul(builder: PlanBuilder, node: Node) -> bool:
    """`weight @ x`, of `x [inputs, tokens]` or `[1, inputs, tokens]`: a linear layer of tokens that stand in columns."""
    weight, source = _parameter(builder, node, 0), arguments(node)[1]
    fake = builder.fake(source)
    columns = fake.dim() == 2 or (fake.dim() == 3 and fake.shape[0] == 1)
    if weight is None or weight.layout.dim() != 2 or not weight.layout.is_contiguous() or not columns:
        return False
    if fake.dtype not in _LINEAR_DTYPES or fake.dtype != weight.layout.dtype:
        return False
    value = builder.stored(source)
    x = Stored(value.memory, value.layout.transpose(-1, -2))
    x = x if row_stride(x.layout) is not None else builder.contiguous_copy(x)
    output = builder.allocate((*x.layout.shape[:-1], weight.layout.shape[0]), fake.dtype)
    builder.emit(Linears(rows_operand(x), (Layer(whole_operand(weight), None, rows_operand(output)),)))
    builder.values[node] = Stored(output.memory, output.layout.transpose(-1, -2))
    return True


def _is_linear(builder: PlanBuilder, node: Node) -> bool:
    if node.target is not aten.linear.default or node not in builder.live:
        return False
    x = arguments(node)[0]
    dtype = builder.fake(x).dtype
    parameters = [
        _parameter(builder, node, index) for index in (1, 2) if len(arguments(node)) > index and arguments(node)[index]
    ]
    return dtype in _LINEAR_DTYPES and all(
        each is not None and each.layout.dtype == dtype and each.layout.is_contiguous() for each in parameters
    )


def _parameter(builder: PlanBuilder, node: Node, index: int) -> Stored | None:
    """A weight or bias, which is in memory before the first step."""
    source = arguments(node)[index] if len(arguments(node)) > index else None
    value = builder.values.get(source) if isinstance(source, Node) else None
    return value if isinstance(value, Stored) and value.memory.kind in ("tensor", "kept") else None


def lower_attend(builder: PlanBuilder, node: Node) -> bool:
    query, keys, values, blocks, positions, scaling, window, softcap, sinks, column_bias, *scales = arguments(node)
    asked = builder.stored(query)
    if asked.layout.stride(-1) != 1:
        asked = builder.contiguous_copy(asked)
    cache = [builder.stored(each) for each in (keys, values)]
    indices = [
        None if each is None else contiguous_operand(builder, each) for each in (blocks, positions, sinks, column_bias)
    ]
    key_scale, value_scale = (None if each is None else whole_operand(builder.stored(each)) for each in scales)
    output = builder.allocate(builder.fake(node).shape, builder.fake(node).dtype)
    assert indices[1] is not None
    builder.emit(
        Attend(
            whole_operand(asked),
            whole_operand(cache[0]),
            whole_operand(cache[1]),
            indices[0],
            indices[1],
            indices[2],
            indices[3],
            whole_operand(output),
            float(scaling),
            int(window),
            float(softcap),
            key_scale,
            value_scale,
        )
    )
    builder.values[node] = output
    return True


def lower_write_cache(builder: PlanBuilder, node: Node) -> bool:
    cache, states, blocks, columns = arguments(node)
    new = builder.stored(states)
    if new.layout.stride(-1) != 1:
        new = builder.contiguous_copy(new)
    block_numbers, column_numbers = (contiguous_operand(builder, each) for each in (blocks, columns))
    target = builder.resting(cache)
    builder.before_writing(target.memory)
    builder.emit(WriteCache(whole_operand(target), whole_operand(new), block_numbers, column_numbers))
    return True


def lower_write_codes(builder: PlanBuilder, node: Node) -> bool:
    codes, scale, states, blocks, columns = arguments(node)
    new = builder.stored(states)
    if new.layout.stride(-1) != 1:
        new = builder.contiguous_copy(new)
    block_numbers, column_numbers = (contiguous_operand(builder, each) for each in (blocks, columns))
    targets = [builder.resting(each) for each in (codes, scale)]
    for each in targets:
        builder.before_writing(each.memory)
    own_codes, own_scale = map(whole_operand, targets)
    builder.emit(WriteCodes(own_codes, own_scale, whole_operand(new), block_numbers, column_numbers))
    return True


def lower_convolve(builder: PlanBuilder, node: Node) -> bool:
    inputs, weight, bias, state, slots, positions = arguments(node)
    own, taps = rows_operand(even_rows(builder, inputs)), contiguous_operand(builder, weight)
    own_bias = None if bias is None else contiguous_operand(builder, bias)
    numbers, columns = (contiguous_operand(builder, each) for each in (slots, positions))
    output = builder.allocate(builder.fake(node).shape, builder.fake(node).dtype)
    target = builder.resting(state)
    builder.before_writing(target.memory)
    builder.emit(Convolve(own, taps, own_bias, whole_operand(target), numbers, columns, whole_operand(output)))
    builder.values[node] = output
    return True


def lower_walk(builder: PlanBuilder, node: Node) -> bool:
    query, key, value, decay, share, rates, state, slots, positions = arguments(node)
    asked, keys, values, decays = (contiguous_operand(builder, each) for each in (query, key, value, decay))
    shares, own_rates = (None if each is None else contiguous_operand(builder, each) for each in (share, rates))
    numbers, columns = (contiguous_operand(builder, each) for each in (slots, positions))
    output = builder.allocate(builder.fake(node).shape, builder.fake(node).dtype)
    target = builder.resting(state)
    builder.before_writing(target.memory)
    kept = whole_operand(target)
    builder.emit(Walk(asked, keys, values, decays, shares, own_rates, kept, numbers, columns, whole_operand(output)))
    builder.values[node] = output
    return True


def lower_experts(builder: PlanBuilder, node: Node) -> bool:
    x, index, weight, bias = arguments(node)
    output = builder.allocate(builder.fake(node).shape, builder.fake(node).dtype)
    builder.emit(
        Experts(
            contiguous_operand(builder, x),
            contiguous_operand(builder, index),
            contiguous_operand(builder, weight),
            None if bias is None else contiguous_operand(builder, bias),
            whole_operand(output),
        )
    )
    builder.values[node] = output
    return True


def lower_sample(builder: PlanBuilder, node: Node) -> bool:
    logits, params, uniforms = arguments(node)
    rows = rows_operand(even_rows(builder, logits))
    output = builder.allocate(builder.fake(node).shape, builder.fake(node).dtype)
    builder.emit(
        Sample(rows, contiguous_operand(builder, params), contiguous_operand(builder, uniforms), whole_operand(output))
    )
    builder.values[node] = output
    return True


def lower_output_rows(builder: PlanBuilder, node: Node) -> bool:
    rows = builder.stored(arguments(node)[0])
    builder.of_live.add(rows.memory)
    builder.values[node] = rows
    return True


def lower_select(builder: PlanBuilder, node: Node) -> bool:
    """Rows of a table, by `embedding`, `index_select`, or `x[:, ..., index]`."""
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
    output = builder.allocate(builder.fake(node).shape, builder.fake(node).dtype)
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
    """`repeat_interleave` by a number along a dimension."""
    source, repeats, *rest = arguments(node)
    dim: Any = rest[0] if rest else node.kwargs.get("dim")
    value = builder.stored(source)
    if not isinstance(repeats, int) or dim is None or value.layout.dtype not in REGISTER_DTYPES:
        return False
    after = dim % value.layout.dim() + 1
    sizes = [-1] * (value.layout.dim() + 1)
    sizes[after] = repeats
    copied = builder.contiguous_copy(Stored(value.memory, value.layout.unsqueeze(after).expand(sizes)))
    builder.values[node] = Stored(copied.memory, copied.layout.flatten(after - 1, after))
    return True


def lower_cat(builder: PlanBuilder, node: Node) -> bool:
    """Every part is written to its place, by the group that computes it where it is in one."""
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
        store(builder, part, output, place)
    builder.values[node] = output
    return True


def lower_copy(builder: PlanBuilder, node: Node) -> bool:
    """One tensor written over another."""
    target, source = arguments(node)[:2]
    place = builder.resting(target)
    fakes = [builder.fake(each) for each in (target, source)]
    alike = fakes[0].shape == fakes[1].shape and fakes[0].dtype == fakes[1].dtype
    if not alike or fakes[0].dtype not in REGISTER_DTYPES or place.memory.kind not in ("arena", "tensor"):
        return False
    builder.before_writing(place.memory)
    store(builder, source, place, place.layout)
    builder.complete(place.memory)
    builder.values[node] = place
    return True


def store(builder: PlanBuilder, source: Node, output: Stored, place: Tensor) -> None:
    """Writes a node's value to a place of its shape in a buffer, in the group that computes it where it is in one."""
    value = builder.values[source]
    if isinstance(value, Pending) and not value.group.closed:
        value.group.store(value.register, output.memory, place, rows=value.rows)
        return
    join = Join(builder, source, [source])
    join.group.store(join.register(source), output.memory, place, rows=False)
