# SPDX-License-Identifier: Apache-2.0
"""Elementwise nodes as operators of a Map. Each function returns False where a Map cannot compute the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from .builder import PlanBuilder, arguments
from .conversions import lower_clone, lower_conversion
from .fusion import REGISTER_DTYPES, is_float
from .join import Join, Number, constant, fits, rounded
from .pointwise import ARITHMETIC, COMPARISONS, CONVERSIONS, COPIES, KEEPS_CONSTANT, LOGICAL, REDUCING, UNARY, aten
from .reductions import lower_layer_norm, lower_reduction, lower_softmax, reduced_dims
from .values import StoredValue


def lower_elementwise(builder: PlanBuilder, node: Node) -> bool:
    """Lower a node by the table that has its operator."""
    target = node.target
    if builder.fake_or_none(node) is None or builder.fake(node).dtype not in REGISTER_DTYPES:
        return False
    if target in CONVERSIONS:
        return lower_conversion(builder, node)
    if target in COPIES or target is aten.contiguous.default:
        return lower_clone(builder, node)
    if not all(builder.fake(source).dtype in REGISTER_DTYPES for source in _find_tensors(builder, node)):
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
        return target not in (aten.any.dim, aten.all.dim) and lower_conversion(builder, node)  # of one element each
    special = _SPECIAL.get(target)
    return special is not None and special(builder, node)


def _find_source(builder: PlanBuilder, node: Node) -> Node | None:
    """Return the first operand; None where it is a number."""
    source = arguments(node)[0]
    return source if isinstance(source, Node) and constant(builder, source) is None else None


def _find_tensors(builder: PlanBuilder, node: Node) -> list[Node]:
    """List the operands that are no constants to a Map."""
    return [source for source in node.all_input_nodes if constant(builder, source) is None]


def _lower_arithmetic(builder: PlanBuilder, node: Node) -> bool:
    first, second = arguments(node)[:2]
    if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("rounding_mode") or len(arguments(node)) > 2:
        return False
    op, integer_op = ARITHMETIC[node.target]
    dtype = builder.fake(node).dtype
    on_floats = is_float(dtype)
    if not on_floats:
        if dtype != torch.int32 or integer_op is None:
            return False
        op = integer_op
    numbers = [constant(builder, first), constant(builder, second)]
    if None not in numbers or (not on_floats and not all(fits(number) for number in numbers)):
        return False
    if on_floats:
        kept = [False, node.target in KEEPS_CONSTANT]
        numbers = [
            each if each is None or exact else rounded(each, dtype) for each, exact in zip(numbers, kept, strict=True)
        ]
    return _lower_operands_of_two(builder, node, op, numbers, dtype)


def _lower_operands_of_two(
    builder: PlanBuilder, node: Node, op: str, numbers: Sequence[Number | None], dtype: torch.dtype
) -> bool:
    """Lower an operator of two operands, some of which are numbers."""
    sources = arguments(node)[:2]
    join = Join(builder, node, [each for each, number in zip(sources, numbers, strict=True) if number is None])
    values = join.operands(sources, numbers, dtype)
    return join.finish(join.compute(op, *values, constants=tuple(number is not None for number in numbers)))


def _lower_compare(builder: PlanBuilder, node: Node) -> bool:
    first, second = arguments(node)[0], arguments(node)[1]
    common = torch.result_type(*(_typed_operand(builder, source) for source in (first, second)))
    on_floats = is_float(common)
    numbers = [constant(builder, first), constant(builder, second)]
    if common not in REGISTER_DTYPES or None not in numbers or (not on_floats and not all(map(fits, numbers))):
        return False
    if on_floats:
        numbers = [None if each is None else rounded(each, common) for each in numbers]
    op = COMPARISONS[node.target]
    return _lower_operands_of_two(builder, node, op if on_floats else "i" + op, numbers, common)


def _typed_operand(builder: PlanBuilder, source: Any) -> Any:
    """Return an operand as torch's rules of promotion see it."""
    return builder.fake(source).to("meta") if isinstance(source, Node) else source


def _lower_logical(builder: PlanBuilder, node: Node) -> bool:
    first, second = arguments(node)[0], arguments(node)[1]
    dtypes = {builder.fake(source).dtype for source in node.all_input_nodes}
    same = dtypes == {builder.fake(node).dtype} and dtypes <= {torch.bool, torch.int32}
    number = constant(builder, second)
    if not same or constant(builder, first) is not None or not fits(number):
        return False
    sources = [first] if number is not None else [first, second]
    join = Join(builder, node, sources)
    values = [join.register(source) for source in sources]
    constants = (False, number is not None)
    if number is not None:
        values.append(int(number))
    return join.finish(join.compute(LOGICAL[node.target], *values, constants=constants))


def _lower_unary(builder: PlanBuilder, node: Node, op: str) -> bool:
    source = _find_source(builder, node)
    if source is None:
        return False
    dtype = builder.fake(node).dtype
    if not is_float(dtype):
        if op not in ("neg", "abs") or dtype != torch.int32:
            return False
        join = Join(builder, node, [source])
        return join.finish(join.compute("i" + op, join.register(source)))
    if is_float(builder.fake(source).dtype) and _in_memory_order(builder, node, source, op):
        return True
    join = Join(builder, node, [source])
    return join.finish(join.compute(op, join.floats(source)))


def _in_memory_order(builder: PlanBuilder, node: Node, source: Node, op: str) -> bool:
    """Lower an operator on a tensor that is contiguous in another order of its dimensions; its result has that order too."""
    value = builder.values[source]
    if not isinstance(value, StoredValue) or value.layout.is_contiguous() or node in builder.uses.written:
        return False
    order = sorted(range(value.layout.dim()), key=value.layout.stride, reverse=True)
    layout = value.layout.permute(order)
    if not layout.is_contiguous():
        return False
    builder.complete_buffer(value.memory)
    group, _ = builder.group_of(layout.shape, [])
    register = group.compute(op, (group.load_value(StoredValue(value.memory, layout), layout.shape, rows=False),))
    wide = builder.uses.are_wide(node, builder.values)
    output = builder.allocate(layout.shape, torch.float32 if wide else builder.fake(node).dtype)
    group.store_register(register, output.memory, output.layout, rows=False)
    back = sorted(range(len(order)), key=order.__getitem__)
    builder.values[node] = StoredValue(output.memory, output.layout.permute(back))
    return True


def _lower_choose(builder: PlanBuilder, node: Node, condition: Any, first: Any, second: Any) -> bool:
    dtype = builder.fake(node).dtype
    numbers = [constant(builder, first), constant(builder, second)]
    if constant(builder, condition) is not None or builder.fake(condition).dtype != torch.bool:
        return False
    on_floats = is_float(dtype)
    if not on_floats and not all(map(fits, numbers)):
        return False
    chosen = [source for source, number in zip((first, second), numbers, strict=True) if number is None]
    join = Join(builder, node, [condition, *chosen])
    test = join.register(condition)
    if on_floats:
        numbers = [None if each is None else rounded(each, dtype) for each in numbers]
    values = join.operands((first, second), numbers, dtype)
    constants = (*(number is not None for number in numbers), False)
    return join.finish(join.compute("where", *values, test, constants=constants))


def _lower_not(builder: PlanBuilder, node: Node) -> bool:
    source = _find_source(builder, node)
    if source is None or builder.fake(source).dtype != torch.bool:
        return False
    join = Join(builder, node, [source])
    return join.finish(join.compute("inot", join.register(source)))


def _lower_is_nan(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    if not is_float(builder.fake(source).dtype):
        return False
    join = Join(builder, node, [source])
    return join.finish(join.compute("isnan", join.register(source)))


def _lower_pow(builder: PlanBuilder, node: Node) -> bool:
    source, exponent = arguments(node)[0], arguments(node)[1]
    if (
        not isinstance(source, Node)
        or not isinstance(exponent, int | float)
        or not is_float(builder.fake(source).dtype)
    ):
        return False
    named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)
    if named is not None:
        return _lower_unary(builder, node, named)
    join = Join(builder, node, [source])
    x = join.register(source)
    if exponent in (2, 3):
        square = join.compute("mul", x, x)
        return join.finish(square if exponent == 2 else join.compute("mul", square, x))
    power = rounded(exponent, builder.fake(node).dtype)
    return join.finish(join.compute("pow", x, power, constants=(False, True)))


def _lower_rsub(builder: PlanBuilder, node: Node) -> bool:
    first, second = arguments(node)[:2]
    number = constant(builder, second)
    if len(arguments(node)) > 2 or node.kwargs or number is None or not is_float(builder.fake(node).dtype):
        return False
    assert isinstance(first, Node)
    join = Join(builder, node, [first])
    whole = rounded(number, builder.fake(node).dtype)
    return join.finish(join.compute("sub", whole, join.floats(first), constants=(True, False)))


def _lower_clamp(builder: PlanBuilder, node: Node) -> bool:
    source = _find_source(builder, node)
    if source is None:
        return False
    bounds = [*arguments(node)[1:], None, None][:2]
    if node.target is aten.clamp_min.default:
        bounds = [arguments(node)[1], None]
    elif node.target is aten.clamp_max.default:
        bounds = [None, arguments(node)[1]]
    bounds = [node.kwargs.get(name, bound) for name, bound in zip(("min", "max"), bounds, strict=True)]
    dtype = builder.fake(node).dtype
    on_floats = is_float(dtype)
    if dtype != builder.fake(source).dtype or dtype == torch.bool:
        return False
    if not on_floats and not all(bound is None or fits(bound) for bound in bounds):
        return False
    join = Join(builder, node, [source])
    register = join.register(source)
    for op, bound in zip(("max", "min"), bounds, strict=True):
        if bound is not None:
            number = rounded(bound, dtype) if on_floats else int(bound)
            register = join.compute(op if on_floats else "i" + op, register, number, constants=(False, True))
    return join.finish(register)


def _lower_square(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    assert isinstance(source, Node)
    join = Join(builder, node, [source])
    x = join.floats(source)
    return join.finish(join.compute("mul", x, x))


def _lower_masked_fill(builder: PlanBuilder, node: Node) -> bool:
    values, mask, fill = arguments(node)[:3]
    return _lower_choose(builder, node, mask, fill, values)


def _lower_gelu(builder: PlanBuilder, node: Node) -> bool:
    return _lower_unary(builder, node, "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu")


_Lowering = Callable[[PlanBuilder, Node], bool]
_SPECIAL: dict[Any, _Lowering] = {
    **dict.fromkeys(
        (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar),
        lambda builder, node: _lower_choose(builder, node, *arguments(node)[:3]),
    ),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _lower_masked_fill),
    **dict.fromkeys((aten.logical_not.default, aten.bitwise_not.default), _lower_not),
    **dict.fromkeys((aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default), _lower_clamp),
    **dict.fromkeys((aten.softmax.int, aten._softmax.default), lower_softmax),
    aten.isnan.default: _lower_is_nan,
    aten.gelu.default: _lower_gelu,
    aten.pow.Tensor_Scalar: _lower_pow,
    aten.square.default: _lower_square,
    aten.rsub.Scalar: _lower_rsub,
    aten.layer_norm.default: lower_layer_norm,
    aten.softplus.default: lambda builder, node: (
        len(arguments(node)) == 1 and not node.kwargs and _lower_unary(builder, node, "softplus")
    ),
}
