# SPDX-License-Identifier: Apache-2.0
"""Attention, caches, slots' states and the sampler as calls of kernels."""

from __future__ import annotations

from torch.fx import Node

from ..steps.steps import Attend, Convolve, Sample, Walk, WriteCache, WriteCodes
from .builder import PlanBuilder, arguments
from .operands import adjacent_operand, contiguous_operand, even_rows, optional_operand, rows_operand, whole_operand
from .values import StoredValue


def lower_attend(builder: PlanBuilder, node: Node) -> bool:
    query, keys, values, blocks, positions, scaling, window, softcap, sinks, column_bias, *scales = arguments(node)
    asked = adjacent_operand(builder, query)
    own_keys, own_values = (whole_operand(builder.stored(each)) for each in (keys, values))
    table, places, sink, bias = (optional_operand(builder, each) for each in (blocks, positions, sinks, column_bias))
    key_scale, value_scale = (None if each is None else whole_operand(builder.stored(each)) for each in scales)
    output = builder.allocate_like(node)
    assert places is not None
    operands = asked, own_keys, own_values, table, places, sink, bias, whole_operand(output)
    builder.emit(Attend(*operands, float(scaling), int(window), float(softcap), key_scale, value_scale))
    builder.values[node] = output
    return True


def lower_write_cache(builder: PlanBuilder, node: Node) -> bool:
    cache, states, blocks, columns = arguments(node)
    new = adjacent_operand(builder, states)
    numbers, places = (contiguous_operand(builder, each) for each in (blocks, columns))
    builder.emit(WriteCache(whole_operand(_open_to_write(builder, cache)), new, numbers, places))
    return True


def lower_write_codes(builder: PlanBuilder, node: Node) -> bool:
    codes, scale, states, blocks, columns = arguments(node)
    new = adjacent_operand(builder, states)
    numbers, places = (contiguous_operand(builder, each) for each in (blocks, columns))
    own_codes, own_scale = (builder.resting(each) for each in (codes, scale))
    for each in (own_codes, own_scale):
        builder.before_writing(each.memory)
    builder.emit(WriteCodes(whole_operand(own_codes), whole_operand(own_scale), new, numbers, places))
    return True


def _open_to_write(builder: PlanBuilder, node: Node) -> StoredValue:
    target = builder.resting(node)
    builder.before_writing(target.memory)
    return target


def lower_convolve(builder: PlanBuilder, node: Node) -> bool:
    inputs, weight, bias, state, slots, positions = arguments(node)
    own, taps = rows_operand(even_rows(builder, inputs)), contiguous_operand(builder, weight)
    own_bias = optional_operand(builder, bias)
    numbers, places = (contiguous_operand(builder, each) for each in (slots, positions))
    output = builder.allocate_like(node)
    target = whole_operand(_open_to_write(builder, state))
    builder.emit(Convolve(own, taps, own_bias, target, numbers, places, whole_operand(output)))
    builder.values[node] = output
    return True


def lower_walk(builder: PlanBuilder, node: Node) -> bool:
    query, key, value, decay, share, rates, state, slots, positions = arguments(node)
    asked, keys, values, decays = (contiguous_operand(builder, each) for each in (query, key, value, decay))
    shares, own_rates = (optional_operand(builder, each) for each in (share, rates))
    numbers, places = (contiguous_operand(builder, each) for each in (slots, positions))
    output = builder.allocate_like(node)
    target = whole_operand(_open_to_write(builder, state))
    builder.emit(Walk(asked, keys, values, decays, shares, own_rates, target, numbers, places, whole_operand(output)))
    builder.values[node] = output
    return True


def lower_sample(builder: PlanBuilder, node: Node) -> bool:
    logits, params, uniforms = arguments(node)
    rows = rows_operand(even_rows(builder, logits))
    output = builder.allocate_like(node)
    own_params, own_uniforms = (contiguous_operand(builder, each) for each in (params, uniforms))
    builder.emit(Sample(rows, own_params, own_uniforms, whole_operand(output)))
    builder.values[node] = output
    return True


def lower_output_rows(builder: PlanBuilder, node: Node) -> bool:
    rows = builder.stored(arguments(node)[0])
    builder.of_live.add(rows.memory)
    builder.values[node] = rows
    return True
