# SPDX-License-Identifier: Apache-2.0
"""Nodes as calls of kernels, which take some layouts of their operands and not others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..operators import NAMESPACE
from ..steps import steps
from ..steps.operands import STATES, Codes, Layer, Operand
from ..steps.steps import Experts, Linears
from .builder import PlanBuilder, arguments
from .fusion import FLOATS, StoredValue
from .pointwise import aten


_OWN = getattr(torch.ops, NAMESPACE)
_MAX_COPIED = 1 << 16  # elements of a weight, in each step


def _take_stored(builder: PlanBuilder, node: Node) -> Operand:
    """Return a node's value as it lies."""
    return builder.stored(node).as_operand()


def _take_contiguous(builder: PlanBuilder, node: Node) -> Operand:
    return builder.contiguous(node).as_operand()


def _take_adjacent(builder: PlanBuilder, node: Node) -> Operand:
    """Return a node's value with adjacent elements in its last dimension."""
    value = builder.stored(node)
    return (value if value.layout.stride(-1) == 1 else builder.contiguous_copy(value)).as_operand()


def _take_to_write(builder: PlanBuilder, node: Node) -> Operand:
    """Return memory that a kernel changes, once all that reads it is emitted."""
    target = builder.resting(node)
    builder.before_writing(target.memory)
    return target.as_operand()


def _as_rows(builder: PlanBuilder, value: StoredValue) -> Operand:
    """Return a value as `[rows, elements]`, rows at equal distances and their elements adjacent: copied where it is not."""
    stride = _row_stride(value.layout)
    if stride is None:
        value, stride = builder.contiguous_copy(value), value.layout.shape[-1]
    place, columns = value.as_operand(), value.layout.shape[-1]
    return Operand(place.buffer, place.dtype, place.offset, (value.layout.numel() // columns, columns), (stride, 1))


def _row_stride(layout: Tensor) -> int | None:
    """Return the elements from a row to the next, where all dimensions but the last count as one; else None."""
    if layout.shape[-1] > 1 and layout.stride(-1) != 1:
        return None
    stride, span = None, 0
    for size, own in reversed(list(zip(layout.shape[:-1], layout.stride()[:-1], strict=True))):
        if size == 1:
            continue
        if stride is not None and own != span:
            return None
        stride, span = own if stride is None else stride, own * size
    return layout.shape[-1] if stride is None else stride


def _take_new(builder: PlanBuilder, node: Node) -> Operand:
    """Return new memory for a node's result."""
    output = builder.allocate_like(node)
    builder.values[node] = output
    return output.as_operand()


_WAYS: dict[str, Callable[[PlanBuilder, Node], Operand]] = {
    "": _take_contiguous,
    "adjacent": _take_adjacent,
    "new": _take_new,
    "rows": lambda builder, node: _as_rows(builder, builder.stored(node)),
    "stored": _take_stored,
    "written": _take_to_write,
}
# The step of each operator, with its operands in the order in which they come to be in memory; `output` is the node's own.
_KERNELS: dict[Any, tuple[type[Any], str]] = {
    _OWN.attend.default: (
        steps.Attend,
        "query:adjacent keys:stored values:stored blocks positions sinks column_bias key_scale:stored value_scale:stored output:new",
    ),
    _OWN.write_cache.default: (steps.WriteCache, "states:adjacent blocks columns cache:written"),
    _OWN.write_codes.default: (steps.WriteCodes, "states:adjacent blocks columns codes:written scale:written"),
    _OWN.convolve.default: (steps.Convolve, "inputs:rows weight bias slots positions output:new state:written"),
    _OWN.walk.default: (steps.Walk, "query key value decay share rates slots positions output:new state:written"),
    _OWN.sample.default: (steps.Sample, "logits:rows output:new params uniforms"),
    _OWN.expert_linear.default: (Experts, "output:new x index weight bias"),
}


def _lower_kernel(builder: PlanBuilder, node: Node) -> bool:
    """Lower an operator with one step, which has the operator's arguments by name."""
    assert isinstance(node.target, torch._ops.OpOverload)
    make, operands = _KERNELS[node.target]
    members: dict[str, Any] = {}
    for declared, value in zip(node.target._schema.arguments, arguments(node), strict=True):
        members[declared.name] = float(value) if declared.type.kind() == "FloatType" else value
    for each in operands.split():
        name, _, way = each.partition(":")
        source = members.get(name, node)
        members[name] = None if source is None else _WAYS[way](builder, source)
    builder.steps.append(make(**members))
    return True


def _lower_output_rows(builder: PlanBuilder, node: Node) -> bool:
    rows = builder.stored(arguments(node)[0])
    builder.of_live.add(rows.memory)
    builder.values[node] = rows
    return True


def _lower_linear(builder: PlanBuilder, node: Node) -> bool:
    if not _is_linear(builder, node):
        return False

    def make_layer(each: Node, output: Operand) -> Layer:
        weight, bias = (_find_parameter(builder, each, index) for index in (1, 2))
        assert weight is not None
        return Layer(weight.as_operand(), None if bias is None else bias.as_operand(), output)

    return _lower_layers(builder, node, lambda user: _is_linear(builder, user), make_layer)


def _lower_quantized_linear(builder: PlanBuilder, node: Node) -> bool:
    def read_form(each: Node) -> tuple[str, int, str | None]:
        _, kind, _, scale, _, _, activations = arguments(each)
        return kind, builder.fake(scale).shape[-1], activations

    def make_layer(each: Node, output: Operand) -> Layer:
        _, kind, codes, scale, shift, bias, activations = arguments(each)
        weight, scales = _take_stored(builder, codes), _take_contiguous(builder, scale)
        own_bias, shifts = (None if part is None else _take_contiguous(builder, part) for part in (bias, shift))
        return Layer(weight, own_bias, output, Codes(kind, scales, shifts, activations))

    return _lower_layers(builder, node, lambda user: read_form(user) == read_form(node), make_layer)


def _lower_layers(
    builder: PlanBuilder, node: Node, is_alike: Callable[[Node], bool], make_layer: Callable[[Node, Operand], Layer]
) -> bool:
    """Lower linear layers that are alike and share their input to one call, where the first one stands."""
    x = arguments(node)[0]
    users = (user for user in x.users if user not in builder.values and user in builder.live)
    alike = [user for user in users if user.target is node.target and arguments(user)[0] is x and is_alike(user)]
    rows = _as_rows(builder, builder.stored(x))
    layers = []
    for each in alike:
        output = builder.allocate_like(each)
        layers.append(make_layer(each, _as_rows(builder, output)))
        builder.values[each] = output
    builder.steps.append(Linears(rows, tuple(layers)))
    return True


def _is_linear(builder: PlanBuilder, node: Node) -> bool:
    x, *others = arguments(node)
    dtype = builder.fake(x).dtype
    parameters = [_find_parameter(builder, node, index) for index, each in enumerate(others[:2], 1) if each]
    return dtype in FLOATS and all(
        each is not None and each.layout.dtype == dtype and each.layout.is_contiguous() for each in parameters
    )


def _find_parameter(builder: PlanBuilder, node: Node, index: int) -> StoredValue | None:
    """Return a weight or bias, which is in memory before the first step."""
    source = arguments(node)[index] if len(arguments(node)) > index else None
    value = builder.values.get(source) if isinstance(source, Node) else None
    return value if isinstance(value, StoredValue) and value.memory.kind in ("tensor", "kept") else None


def _lower_product(builder: PlanBuilder, node: Node) -> bool:
    """Lower a product of two tensors that steps compute, in float32."""
    if node.target is aten.matmul.default and _lower_matmul(builder, node):
        return True
    sources, fake = arguments(node)[:2], builder.fake(node)
    fakes = [builder.fake(each) for each in sources]
    if fake.dtype not in FLOATS or any(each.dim() < 2 or each.numel() == 0 for each in (fake, *fakes)):
        return False
    if any(_is_large_weight(builder, each) for each in sources):
        return False
    operands = [
        builder.expanded(each, (*fake.shape[:-2], *own.shape[-2:])) for each, own in zip(sources, fakes, strict=True)
    ]
    output = builder.allocate(fake.shape, torch.float32)
    left, right = map(_as_matrices, operands)
    builder.steps.append(steps.MatMul(left, right, _as_matrices(output)))
    builder.values[node] = builder.contiguous_copy(output, fake.dtype) if node in builder.written else output
    return True


def _is_large_weight(builder: PlanBuilder, node: Node) -> bool:
    """Return whether each step would have to copy a large weight to have it contiguous and in float32."""
    value = builder.values[node]
    if not isinstance(value, StoredValue) or value.memory.kind != "tensor" or value.memory.name.startswith(STATES):
        return False
    lies_so = value.layout.is_contiguous() and value.layout.dtype == torch.float32
    return not lies_so and value.layout.numel() > _MAX_COPIED


def _as_matrices(value: StoredValue) -> Operand:
    """Return a contiguous value as `[matrices, rows, columns]`."""
    return StoredValue(value.memory, value.layout.view(-1, *value.layout.shape[-2:])).as_operand()


def _lower_matmul(builder: PlanBuilder, node: Node) -> bool:
    """Lower `weight @ x`, of `x [inputs, tokens]` or `[1, inputs, tokens]`: a linear layer with a token in each column."""
    weight, source = _find_parameter(builder, node, 0), arguments(node)[1]
    fake = builder.fake(source)
    columns = fake.dim() == 2 or (fake.dim() == 3 and fake.shape[0] == 1)
    if weight is None or weight.layout.dim() != 2 or not weight.layout.is_contiguous() or not columns:
        return False
    if fake.dtype not in FLOATS or fake.dtype != weight.layout.dtype:
        return False
    value = builder.stored(source)
    x = StoredValue(value.memory, value.layout.transpose(-1, -2))
    rows = _as_rows(builder, x)
    output = builder.allocate((*x.layout.shape[:-1], weight.layout.shape[0]), fake.dtype)
    builder.steps.append(Linears(rows, (Layer(weight.as_operand(), None, _as_rows(builder, output)),)))
    builder.values[node] = StoredValue(output.memory, output.layout.transpose(-1, -2))
    return True


def _lower_quantized_experts(builder: PlanBuilder, node: Node) -> bool:
    x, index, kind, codes, scale, shift, bias, activations = arguments(node)
    rows, places, scales = (_take_contiguous(builder, each) for each in (x, index, scale))
    shifts, own_bias = (None if each is None else _take_contiguous(builder, each) for each in (shift, bias))
    output, form = _take_new(builder, node), Codes(kind, scales, shifts, activations)
    builder.steps.append(Experts(rows, places, _take_stored(builder, codes), own_bias, output, form))
    return True


LOWERINGS: dict[Any, Callable[[PlanBuilder, Node], bool]] = {
    **dict.fromkeys(_KERNELS, _lower_kernel),
    _OWN.output_rows.default: _lower_output_rows,
    _OWN.quantized_linear.default: _lower_quantized_linear,
    _OWN.quantized_expert_linear.default: _lower_quantized_experts,
    aten.linear.default: _lower_linear,
    **dict.fromkeys((aten.matmul.default, aten.bmm.default), _lower_product),
}
