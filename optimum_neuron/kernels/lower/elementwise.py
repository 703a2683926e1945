# SPDX-License-Identifier: Apache-2.0
"""Elementwise nodes as operators of a Map. Each function returns False where a Map cannot compute the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from .builder import PlanBuilder, arguments
from .fusion import FLOATS, REGISTER_DTYPES, Constant, StoredValue
from .join import Join, constant, lower_norm, lower_reduction, lower_softmax, read_numbers, reduced_dims
from .moves import lower_clone, lower_conversion
from .pointwise import (
    ARITHMETIC,
    COMPARISONS,
    CONVERSIONS,
    COPIES,
    DIVISIONS,
    KEEPS_CONSTANT,
    LOGICAL,
    REDUCING,
    REMAINDERS,
    UNARY,
    aten,
    find_divisor,
)


def lower_elementwise(builder: PlanBuilder, node: Node) -> bool:
    """Lower a node by the table that has its operator."""
    target = node.target
    if builder.fake_or_none(node) is None:
        return False
    if target in CONVERSIONS:
        return lower_conversion(builder, node)
    if builder.fake(node).dtype not in REGISTER_DTYPES:
        return False
    if target in COPIES or target is aten.contiguous.default:
        return lower_clone(builder, node)
    tensors = [source for source in node.all_input_nodes if constant(builder, source) is None]
    if not all(builder.fake(source).dtype in REGISTER_DTYPES for source in tensors):
        return False
    if target in ARITHMETIC:
        return _lower_arithmetic(builder, node)
    if target in COMPARISONS:
        return _lower_compare(builder, node)
    if target in LOGICAL:
        return _lower_logical(builder, node)
    if target in UNARY:
        return _lower_unary(builder, node, UNARY[target])
    if target in REDUCING:
        if reduced_dims(builder, node):
            return lower_reduction(builder, node)
        return lower_conversion(builder, node)  # of one element each
    return target in _SPECIAL and _SPECIAL[target](builder, node)


def _lower_operator(
    builder: PlanBuilder, node: Node, op: str, sources: Sequence[Any], dtype: torch.dtype, exact: Sequence[int] = ()
) -> bool:
    """Lower an operator on operands of a type, some of which are numbers; as `read_numbers`."""
    numbers = read_numbers(builder, sources, dtype, exact)
    if numbers is None or None not in numbers:
        return False
    join = Join(builder, node, [each for each, number in zip(sources, numbers, strict=True) if number is None])
    return join.finish(join.compute(op, *join.operands(sources, numbers, dtype)))


def _lower_arithmetic(builder: PlanBuilder, node: Node) -> bool:
    if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("rounding_mode") or len(arguments(node)) > 2:
        return False
    dtype, exact = builder.fake(node).dtype, [1] if node.target in KEEPS_CONSTANT else []
    if dtype not in (*FLOATS, torch.int32):
        return False
    op = ARITHMETIC[node.target][0 if dtype in FLOATS else 1]
    return op is not None and _lower_operator(builder, node, op, arguments(node), dtype, exact)


def _lower_compare(builder: PlanBuilder, node: Node) -> bool:
    sources = arguments(node)[:2]
    typed = [builder.fake(each).to("meta") if isinstance(each, Node) else each for each in sources]
    common = torch.result_type(*typed)
    op = COMPARISONS[node.target] if common in FLOATS else "i" + COMPARISONS[node.target]
    return common in REGISTER_DTYPES and _lower_operator(builder, node, op, sources, common)


def _lower_logical(builder: PlanBuilder, node: Node) -> bool:
    dtype = builder.fake(node).dtype
    same = {builder.fake(source).dtype for source in node.all_input_nodes} == {dtype}
    if not same or dtype not in (torch.bool, torch.int32) or constant(builder, arguments(node)[0]) is not None:
        return False
    return _lower_operator(builder, node, LOGICAL[node.target], arguments(node)[:2], dtype)


def _lower_unary(builder: PlanBuilder, node: Node, op: str) -> bool:
    source = arguments(node)[0]
    if constant(builder, source) is not None:
        return False
    dtype = builder.fake(node).dtype
    if dtype not in FLOATS:
        if op not in ("neg", "abs") or dtype != torch.int32:
            return False
        op = "i" + op
    elif builder.fake(source).dtype in FLOATS and _lower_in_memory_order(builder, node, source, op):
        return True
    join = Join(builder, node, [source])
    return join.finish(join.compute(op, *join.operands([source], [None], dtype)))


def _lower_in_memory_order(builder: PlanBuilder, node: Node, source: Node, op: str) -> bool:
    """Lower an operator on a tensor that is contiguous in another order of its dimensions; its result has that order too."""
    value = builder.values[source]
    if not isinstance(value, StoredValue) or value.layout.is_contiguous() or node in builder.written:
        return False
    order = sorted(range(value.layout.dim()), key=value.layout.stride, reverse=True)
    layout = value.layout.permute(order)
    if not layout.is_contiguous():
        return False
    builder.complete_buffer(value.memory)
    group, _ = builder.group_of(layout.shape, [])
    register = group.compute(op, group.load_value(StoredValue(value.memory, layout), layout.shape, rows=False))
    output = builder.allocate_wide(node, layout.shape)
    group.store_register(register, output, rows=False)
    back = sorted(range(len(order)), key=order.__getitem__)
    builder.values[node] = StoredValue(output.memory, output.layout.permute(back))
    return True


def _lower_choose(builder: PlanBuilder, node: Node) -> bool:
    condition, *chosen = arguments(node)[:3]
    if node.target in _MASKED_FILLS:
        condition, chosen = chosen[0], [chosen[1], condition]
    dtype = builder.fake(node).dtype
    numbers = read_numbers(builder, chosen, dtype)
    is_known = constant(builder, condition) is not None or builder.fake(condition).dtype != torch.bool
    if is_known or numbers is None:
        return False
    tensors = [source for source, number in zip(chosen, numbers, strict=True) if number is None]
    join = Join(builder, node, [condition, *tensors])
    test = join.register(condition)
    return join.finish(join.compute("where", *join.operands(chosen, numbers, dtype), test))


def _lower_test(builder: PlanBuilder, node: Node) -> bool:
    """Lower `isnan` of floats, and `not` of booleans."""
    source = arguments(node)[0]
    dtype = builder.fake(source).dtype
    is_nan = node.target is aten.isnan.default
    if constant(builder, source) is not None or not (dtype in FLOATS if is_nan else dtype == torch.bool):
        return False
    join = Join(builder, node, [source])
    return join.finish(join.compute("isnan" if is_nan else "inot", join.register(source)))


def _lower_pow(builder: PlanBuilder, node: Node) -> bool:
    source, exponent = (*arguments(node), 2)[:2]  # of `square`
    if builder.fake(source).dtype not in FLOATS:
        return False
    named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)
    if named is not None:
        return _lower_unary(builder, node, named)
    if exponent not in (2, 3):
        return _lower_operator(builder, node, "pow", (source, exponent), builder.fake(node).dtype)
    join = Join(builder, node, [source])
    x = join.register(source)
    square = join.compute("mul", x, x)
    return join.finish(square if exponent == 2 else join.compute("mul", square, x))


def _lower_rsub(builder: PlanBuilder, node: Node) -> bool:
    dtype, operands = builder.fake(node).dtype, arguments(node)[::-1]
    plain = len(operands) == 2 and not node.kwargs and dtype in FLOATS
    return plain and _lower_operator(builder, node, "sub", operands, dtype)


def _lower_division(builder: PlanBuilder, node: Node) -> bool:
    divisor, source = find_divisor(node), arguments(node)[0]
    types = {builder.fake(node).dtype, builder.fake(source).dtype}
    if divisor is None or types != {torch.int32} or constant(builder, source) is not None:
        return False
    join = Join(builder, node, [source])
    x = join.register(source)
    result = join.compute("ifloor_div", x, Constant(divisor))
    if node.target in REMAINDERS:
        result = join.compute("isub", x, join.compute("imul", result, Constant(divisor)))
    return join.finish(result)


def _lower_clamp(builder: PlanBuilder, node: Node) -> bool:
    source, *bounds = (*arguments(node), None, None)[:3]
    if node.target is aten.clamp_max.default:
        bounds.reverse()
    bounds = [node.kwargs.get(name, bound) for name, bound in zip(("min", "max"), bounds, strict=True)]
    dtype = builder.fake(node).dtype
    numbers = read_numbers(builder, bounds, dtype)
    if constant(builder, source) is not None or numbers is None or dtype == torch.bool:
        return False
    tensors = [each for each, number in zip(bounds, numbers, strict=True) if number is None and each is not None]
    if any(builder.fake(each).dtype != dtype for each in (source, *tensors)):
        return False
    join = Join(builder, node, [source, *tensors])
    register = join.register(source)
    for op, bound, number in zip(("max", "min"), bounds, numbers, strict=True):
        if bound is not None:
            other: int | Constant = join.register(bound) if number is None else number
            register = join.compute(op if dtype in FLOATS else "i" + op, register, other)
    return join.finish(register)


def _lower_activation(builder: PlanBuilder, node: Node) -> bool:
    if node.target is aten.gelu.default:
        return _lower_unary(builder, node, "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu")
    return len(arguments(node)) == 1 and not node.kwargs and _lower_unary(builder, node, "softplus")


_MASKED_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
_CHOICES = (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar, *_MASKED_FILLS)
_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.clamp.Tensor)
# Operators with a rule of their own.
_SPECIAL: dict[Any, Callable[[PlanBuilder, Node], bool]] = {
    **dict.fromkeys(_CHOICES, _lower_choose),
    **dict.fromkeys((aten.logical_not.default, aten.bitwise_not.default, aten.isnan.default), _lower_test),
    **dict.fromkeys(DIVISIONS | REMAINDERS, _lower_division),
    **dict.fromkeys(_CLAMPS, _lower_clamp),
    **dict.fromkeys((aten.softmax.int, aten._softmax.default), lower_softmax),
    **dict.fromkeys((aten.pow.Tensor_Scalar, aten.square.default), _lower_pow),
    **dict.fromkeys((aten.gelu.default, aten.softplus.default), _lower_activation),
    aten.rsub.Scalar: _lower_rsub,
    **dict.fromkeys((aten.layer_norm.default, aten.rms_norm.default), lower_norm),
}
# What becomes operators of a Map.
MAPPED: frozenset[Any] = frozenset(
    {*ARITHMETIC, *COMPARISONS, *LOGICAL, *UNARY, *REDUCING, *CONVERSIONS, *COPIES, *_SPECIAL}
    | {aten.contiguous.default, aten.copy_.default}
)
