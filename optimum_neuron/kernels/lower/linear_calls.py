# SPDX-License-Identifier: Apache-2.0
"""Linear layers and experts as calls of kernels, with plain weights or with codes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from ..steps.steps import Codes, Experts, Layer, Linears
from .builder import PlanBuilder, arguments
from .operands import contiguous_operand, even_rows, optional_operand, row_stride, rows_operand, whole_operand
from .pointwise import aten
from .values import StoredValue


_LINEAR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def lower_linear(builder: PlanBuilder, node: Node) -> bool:
    """Lower linear layers that share their input to one call, where the first one stands."""
    if not _is_linear(builder, node):
        return False
    together = _find_siblings(builder, node, lambda user: _is_linear(builder, user))
    rows = rows_operand(even_rows(builder, arguments(node)[0]))
    layers = []
    for each in together:
        output = builder.allocate_like(each)
        weight, bias = (_find_parameter(builder, each, index) for index in (1, 2))
        assert weight is not None
        own_bias = None if bias is None else whole_operand(bias)
        layers.append(Layer(whole_operand(weight), own_bias, rows_operand(output)))
        builder.values[each] = output
    builder.emit(Linears(rows, tuple(layers)))
    return True


def _find_siblings(builder: PlanBuilder, node: Node, is_alike: Callable[[Node], bool]) -> list[Node]:
    """Return the nodes of one operator that take the same input, and are still to be lowered."""
    x = arguments(node)[0]
    users = (user for user in x.users if user not in builder.values and user in builder.live)
    return [user for user in users if user.target is node.target and arguments(user)[0] is x and is_alike(user)]


def _is_linear(builder: PlanBuilder, node: Node) -> bool:
    if node.target is not aten.linear.default or node not in builder.live:
        return False
    x, *others = arguments(node)
    dtype = builder.fake(x).dtype
    parameters = [_find_parameter(builder, node, index) for index, each in enumerate(others[:2], 1) if each]
    return dtype in _LINEAR_DTYPES and all(
        each is not None and each.layout.dtype == dtype and each.layout.is_contiguous() for each in parameters
    )


def _find_parameter(builder: PlanBuilder, node: Node, index: int) -> StoredValue | None:
    """Return a weight or bias, which is in memory before the first step."""
    source = arguments(node)[index] if len(arguments(node)) > index else None
    value = builder.values.get(source) if isinstance(source, Node) else None
    return value if isinstance(value, StoredValue) and value.memory.kind in ("tensor", "kept") else None


def lower_matmul(builder: PlanBuilder, node: Node) -> bool:
    """Lower `weight @ x`, of `x [inputs, tokens]` or `[1, inputs, tokens]`: a linear layer with a token in each column."""
    weight, source = _find_parameter(builder, node, 0), arguments(node)[1]
    fake = builder.fake(source)
    columns = fake.dim() == 2 or (fake.dim() == 3 and fake.shape[0] == 1)
    if weight is None or weight.layout.dim() != 2 or not weight.layout.is_contiguous() or not columns:
        return False
    if fake.dtype not in _LINEAR_DTYPES or fake.dtype != weight.layout.dtype:
        return False
    value = builder.stored(source)
    x = StoredValue(value.memory, value.layout.transpose(-1, -2))
    x = x if row_stride(x.layout) is not None else builder.contiguous_copy(x)
    output = builder.allocate((*x.layout.shape[:-1], weight.layout.shape[0]), fake.dtype)
    builder.emit(Linears(rows_operand(x), (Layer(whole_operand(weight), None, rows_operand(output)),)))
    builder.values[node] = StoredValue(output.memory, output.layout.transpose(-1, -2))
    return True


def lower_quantized_linear(builder: PlanBuilder, node: Node) -> bool:
    """Lower layers that share their input to one call where they are quantized alike."""
    form = _read_form(builder, node)
    together = _find_siblings(builder, node, lambda user: _read_form(builder, user) == form)
    rows = rows_operand(even_rows(builder, arguments(node)[0]))
    layers = []
    for each in together:
        _, kind, codes, scale, shift, bias, activations = arguments(each)
        output = builder.allocate_like(each)
        weight, scales = whole_operand(builder.stored(codes)), contiguous_operand(builder, scale)
        own_bias, shifts = (optional_operand(builder, part) for part in (bias, shift))
        layers.append(Layer(weight, own_bias, rows_operand(output), Codes(kind, scales, shifts, activations)))
        builder.values[each] = output
    builder.emit(Linears(rows, tuple(layers)))
    return True


def _read_form(builder: PlanBuilder, node: Node) -> tuple[str, int, str | None]:
    """Return the kind of codes, the number of groups, and what activations are rounded to."""
    _, kind, _, scale, _, _, activations = arguments(node)
    return kind, builder.fake(scale).shape[-1], activations


def lower_experts(builder: PlanBuilder, node: Node) -> bool:
    output = builder.allocate_like(node)
    x, index, weight, bias = (optional_operand(builder, each) for each in arguments(node))
    assert x is not None and index is not None and weight is not None
    builder.emit(Experts(x, index, weight, bias, whole_operand(output)))
    builder.values[node] = output
    return True


def lower_quantized_experts(builder: PlanBuilder, node: Node) -> bool:
    x, index, kind, codes, scale, shift, bias, activations = arguments(node)
    rows, places, scales = (contiguous_operand(builder, each) for each in (x, index, scale))
    shifts, own_bias = (optional_operand(builder, each) for each in (shift, bias))
    output = builder.allocate_like(node)
    weight, form = whole_operand(builder.stored(codes)), Codes(kind, scales, shifts, activations)
    builder.emit(Experts(rows, places, weight, own_bias, whole_operand(output), form))
    builder.values[node] = output
    return True
