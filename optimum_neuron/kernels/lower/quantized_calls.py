# SPDX-License-Identifier: Apache-2.0
"""Linear layers and experts with quantized weights: nodes that become calls of kernels."""

from __future__ import annotations

from torch.fx import Node

from ..plan.program import Codes, Experts, Layer, Linears
from .builder import PlanBuilder, arguments
from .operands import contiguous_operand, even_rows, rows_operand, whole_operand


def lower_quantized_linear(builder: PlanBuilder, node: Node) -> bool:
    """Layers that share their input become one call where they are quantized alike."""
    x = arguments(node)[0]
    assert isinstance(x, Node)
    form = _form(builder, node)
    together = [
        user
        for user in x.users
        if user not in builder.values
        and user in builder.live
        and user.target is node.target
        and arguments(user)[0] is x
        and _form(builder, user) == form
    ]
    rows = rows_operand(even_rows(builder, x))
    layers = []
    for each in together:
        _, kind, codes, scale, shift, bias, activations = arguments(each)
        output = builder.allocate(builder.fake(each).shape, builder.fake(each).dtype)
        weight, scales = whole_operand(builder.stored(codes)), contiguous_operand(builder, scale)
        own_bias, shifts = (None if part is None else contiguous_operand(builder, part) for part in (bias, shift))
        layers.append(Layer(weight, own_bias, rows_operand(output), Codes(kind, scales, shifts, activations)))
        builder.values[each] = output
    builder.emit(Linears(rows, tuple(layers)))
    return True


def _form(builder: PlanBuilder, node: Node) -> tuple[str, int, str | None]:
    """Kind, number of groups, and what activations are rounded to."""
    _, kind, _, scale, _, _, activations = arguments(node)
    return kind, builder.fake(scale).shape[-1], activations


def lower_quantized_experts(builder: PlanBuilder, node: Node) -> bool:
    x, index, kind, codes, scale, shift, bias, activations = arguments(node)
    rows, places, scales = (contiguous_operand(builder, each) for each in (x, index, scale))
    shifts, own_bias = (None if each is None else contiguous_operand(builder, each) for each in (shift, bias))
    output = builder.allocate(builder.fake(node).shape, builder.fake(node).dtype)
    weight = whole_operand(builder.stored(codes))
    form = Codes(kind, scales, shifts, activations)
    builder.emit(Experts(rows, places, weight, own_bias, whole_operand(output), form))
    builder.values[node] = output
    return True
