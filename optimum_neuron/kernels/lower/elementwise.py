# SPDX-License-Identifier: Apache-2.0
"""Nodes that become operators of a Map. Each function returns False where a Map cannot compute the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..plan.values import Known, Stored
from .builder import PlanBuilder, arguments
from .fusion import REGISTER_DTYPES, is_float
from .join import Join, Number, constant, fits, rounded
from .pointwise import (
    ARITHMETIC,
    COMPARISONS,
    CONVERSIONS,
    COPIES,
    KEEPS_CONSTANT,
    LOGICAL,
    REDUCING,
    UNARY,
    aten,
)
from .reductions import lower_layer_norm, lower_reduction, lower_softmax, reduced_dims


def lower_elementwise(builder: PlanBuilder, node: Node) -> bool:
    """Lowers a node by the table that has its operator."""
    target = node.target
    if builder.fake_or_none(node) is None or builder.fake(node).dtype not in REGISTER_DTYPES:
        return False
    if target in CONVERSIONS:
        return _convert(builder, node)
    if target in COPIES or target is aten.contiguous.default:
        return _copy(builder, node)
    if not all(builder.fake(source).dtype in REGISTER_DTYPES for source in _tensors(builder, node)):
        return False
    if target in ARITHMETIC:
        return _arithmetic(builder, node)
    if target in COMPARISONS:
        return _compare(builder, node)
    if target in LOGICAL:
        return _logical(builder, node)
    if target in UNARY:
        return _unary(builder, node, UNARY[target])
    if target in REDUCING:
        if reduced_dims(builder, node):
            return lower_reduction(builder, node)
        return target not in (aten.any.dim, aten.all.dim) and _convert(builder, node)  # of one element each
    special = _SPECIAL.get(target)
    return special is not None and special(builder, node)


def _tensors(builder: PlanBuilder, node: Node) -> list[Node]:
    """Operands that are no constants to a Map."""
    return [source for source in node.all_input_nodes if constant(builder, source) is None]


def _arithmetic(builder: PlanBuilder, node: Node) -> bool:
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
    return _of_two(builder, node, op, numbers, dtype)


def _of_two(builder: PlanBuilder, node: Node, op: str, numbers: Sequence[Number | None], dtype: torch.dtype) -> bool:
    """An operator of two operands, of which those that are numbers are given."""
    sources = arguments(node)[:2]
    join = Join(builder, node, [each for each, number in zip(sources, numbers, strict=True) if number is None])
    values = join.operands(sources, numbers, dtype)
    return join.finish(join.compute(op, *values, constants=tuple(number is not None for number in numbers)))


def _compare(builder: PlanBuilder, node: Node) -> bool:
    first, second = arguments(node)[0], arguments(node)[1]
    common = torch.result_type(*(_typed(builder, source) for source in (first, second)))
    on_floats = is_float(common)
    numbers = [constant(builder, first), constant(builder, second)]
    if common not in REGISTER_DTYPES or None not in numbers or (not on_floats and not all(map(fits, numbers))):
        return False
    if on_floats:
        numbers = [None if each is None else rounded(each, common) for each in numbers]
    op = COMPARISONS[node.target]
    return _of_two(builder, node, op if on_floats else "i" + op, numbers, common)


def _typed(builder: PlanBuilder, source: Any) -> Any:
    """An operand as torch's rules of promotion look at it."""
    return builder.fake(source).to("meta") if isinstance(source, Node) else source


def _logical(builder: PlanBuilder, node: Node) -> bool:
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


def _unary(builder: PlanBuilder, node: Node, op: str) -> bool:
    source = arguments(node)[0]
    if not isinstance(source, Node) or constant(builder, source) is not None:
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
    """An operator on what lies side by side in another order of its dimensions: read and written as it lies."""
    value = builder.values[source]
    if not isinstance(value, Stored) or value.layout.is_contiguous() or node in builder.uses.written:
        return False
    order = sorted(range(value.layout.dim()), key=value.layout.stride, reverse=True)
    layout = value.layout.permute(order)
    if not layout.is_contiguous():
        return False
    builder.complete(value.memory)
    group, _ = builder.group_of(layout.shape, [])
    register = group.compute(op, (group.load(Stored(value.memory, layout), layout.shape, rows=False),))
    wide = builder.uses.are_wide(node, builder.values)
    output = builder.allocate(layout.shape, torch.float32 if wide else builder.fake(node).dtype)
    group.store(register, output.memory, output.layout, rows=False)
    back = sorted(range(len(order)), key=order.__getitem__)
    builder.values[node] = Stored(output.memory, output.layout.permute(back))
    return True


def _convert(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    assert isinstance(source, Node)
    before, after = builder.fake(source).dtype, builder.fake(node).dtype
    if before == after:
        builder.share(node, source)
        return True
    # What int64 holds is known to fit where it is made int32.
    readable = before in (*REGISTER_DTYPES, torch.int8) or (before == torch.int64 and after == torch.int32)
    value = builder.values[source]
    if not readable or after not in REGISTER_DTYPES or isinstance(value, Known):
        return False
    if _is_unrounded(builder, node, value):
        builder.values[node] = value
        return True
    join = Join(builder, node, [source])
    register = join.register(source)
    if is_float(before) and is_float(after):
        return join.finish(register)
    if is_float(after):
        return join.finish(join.compute("to_float", register))
    op = {torch.int32: "to_int", torch.bool: "to_bool"}[after] if is_float(before) else ""
    if not op and after == torch.bool:
        op = "ito_bool"
    return join.finish(join.compute(op, register) if op else register)


def _is_unrounded(builder: PlanBuilder, node: Node, value: Any) -> bool:
    """Whether a conversion, to float32 or to what Maps take unrounded, gives what a step left in float32: it need not be copied."""
    if not isinstance(value, Stored) or value.memory.kind != "arena" or value.layout.dtype != torch.float32:
        return False
    taken = builder.fake(node).dtype == torch.float32 or builder.uses.are_wide(node, builder.values)
    return taken and not builder.writes_by_torch


def _copy(builder: PlanBuilder, node: Node) -> bool:
    """A contiguous copy, made if need be."""
    source = arguments(node)[0]
    assert isinstance(source, Node)
    value = builder.values[source]
    copied = node.target in COPIES or not builder.fake(source).is_contiguous()
    apart = copied and builder.writes_by_torch
    if apart or (isinstance(value, Stored) and not value.layout.is_contiguous()):
        if isinstance(value, Known):
            return False
        join = Join(builder, node, [source])
        return join.finish(join.register(source))
    builder.share(node, source)
    return True


def _where(builder: PlanBuilder, node: Node) -> bool:
    return _choose(builder, node, *arguments(node)[:3])


def _masked_fill(builder: PlanBuilder, node: Node) -> bool:
    values, mask, fill = arguments(node)[:3]
    return _choose(builder, node, mask, fill, values)


def _choose(builder: PlanBuilder, node: Node, condition: Any, first: Any, second: Any) -> bool:
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


def _not(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    if (
        not isinstance(source, Node)
        or builder.fake(source).dtype != torch.bool
        or constant(builder, source) is not None
    ):
        return False
    join = Join(builder, node, [source])
    return join.finish(join.compute("inot", join.register(source)))


def _is_nan(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    if not isinstance(source, Node) or not is_float(builder.fake(source).dtype):
        return False
    join = Join(builder, node, [source])
    return join.finish(join.compute("isnan", join.register(source)))


def _gelu(builder: PlanBuilder, node: Node) -> bool:
    return _unary(builder, node, "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu")


def _pow(builder: PlanBuilder, node: Node) -> bool:
    source, exponent = arguments(node)[0], arguments(node)[1]
    if (
        not isinstance(source, Node)
        or not isinstance(exponent, int | float)
        or not is_float(builder.fake(source).dtype)
    ):
        return False
    named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)
    if named is not None:
        return _unary(builder, node, named)
    join = Join(builder, node, [source])
    x = join.register(source)
    if exponent in (2, 3):
        square = join.compute("mul", x, x)
        return join.finish(square if exponent == 2 else join.compute("mul", square, x))
    power = rounded(exponent, builder.fake(node).dtype)
    return join.finish(join.compute("pow", x, power, constants=(False, True)))


def _rsub(builder: PlanBuilder, node: Node) -> bool:
    first, second = arguments(node)[:2]
    number = constant(builder, second)
    if len(arguments(node)) > 2 or node.kwargs or number is None or not is_float(builder.fake(node).dtype):
        return False
    assert isinstance(first, Node)
    join = Join(builder, node, [first])
    whole = rounded(number, builder.fake(node).dtype)
    return join.finish(join.compute("sub", whole, join.floats(first), constants=(True, False)))


def _clamp(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    if not isinstance(source, Node) or constant(builder, source) is not None:
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


def _softplus(builder: PlanBuilder, node: Node) -> bool:
    return len(arguments(node)) == 1 and not node.kwargs and _unary(builder, node, "softplus")


def _square(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    assert isinstance(source, Node)
    join = Join(builder, node, [source])
    x = join.floats(source)
    return join.finish(join.compute("mul", x, x))


_SPECIAL: dict[Any, Callable[[PlanBuilder, Node], bool]] = {
    aten.where.self: _where,
    aten.where.ScalarSelf: _where,
    aten.where.ScalarOther: _where,
    aten.where.Scalar: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.logical_not.default: _not,
    aten.bitwise_not.default: _not,
    aten.isnan.default: _is_nan,
    aten.gelu.default: _gelu,
    aten.pow.Tensor_Scalar: _pow,
    aten.square.default: _square,
    aten.rsub.Scalar: _rsub,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: _clamp,
    aten.softmax.int: lower_softmax,
    aten._softmax.default: lower_softmax,
    aten.layer_norm.default: lower_layer_norm,
    aten.softplus.default: _softplus,
}
