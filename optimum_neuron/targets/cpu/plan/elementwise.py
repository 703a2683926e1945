# SPDX-License-Identifier: Apache-2.0
"""Nodes that become operators of a Map. Each function returns False where a Map cannot compute the node."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from .builder import PlanBuilder, arguments
from .fusion import REGISTER_DTYPES, Pending, is_float, squeezed
from .pointwise import (
    ARITHMETIC,
    COMPARISONS,
    CONVERSIONS,
    COPIES,
    KEEPS_CONSTANT,
    LOGICAL,
    MEANS,
    REDUCING,
    UNARY,
    aten,
)
from .values import Known, Stored


_INT32 = range(-(2**31), 2**31)


class Join:
    """A node on its way into a group: what its operands are there."""

    def __init__(
        self,
        builder: PlanBuilder,
        node: Node,
        operands: list[Node],
        *,
        inner: int | None = None,
        order: list[int] | None = None,
    ) -> None:
        """Finds the group.

        Args:
            inner: how many dimensions of more than one element a reduction of the first operand takes.
            order: of its dimensions, where those that it takes are not the last.
        """
        self.builder, self.node, self.order = builder, node, order
        self.shape = builder.fake(node if inner is None else operands[0]).shape
        if order is not None:
            builder.loadable(operands[0])
            self.shape = torch.Size([self.shape[dim] for dim in order])
        self.group, self.rows = builder.group_of(self.shape, operands, inner=inner)

    def register(self, source: Node) -> int:
        value = self.builder.values[source]
        if isinstance(value, Pending) and value.group is self.group:
            return self.group.spread(value.register) if value.rows and not self.rows else value.register
        stored = self.builder.loadable(source)
        if self.order is not None:
            stored = Stored(stored.memory, stored.layout.permute(self.order))
        return self.group.load(stored, self.shape, rows=self.rows)

    def floats(self, source: Node) -> int:
        register = self.register(source)
        return register if is_float(self.builder.fake(source).dtype) else self.compute("to_float", register)

    def compute(self, op: str, *operands: int | float, constants: tuple[bool, ...] = ()) -> int:
        return self.group.compute(op, operands, constants, rows=self.rows)

    def finish(self, register: int, *, rows: bool | None = None) -> bool:
        rows = self.rows if rows is None else rows
        dtype = self.builder.fake(self.node).dtype
        if self.node in self.builder.uses.written:  # who reads it after that gets it from memory
            register = self.group.rounded(register, dtype, rows=rows)
        value = self.group.add(register, dtype, rows=rows)
        value.nodes.append(self.node)
        self.builder.values[self.node] = value
        return True


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
        return _reduce(builder, node)
    special = _SPECIAL.get(target)
    return special is not None and special(builder, node)


def _tensors(builder: PlanBuilder, node: Node) -> list[Node]:
    """Operands that are no constants to a Map."""
    return [source for source in node.all_input_nodes if _constant(builder, source) is None]


def _constant(builder: PlanBuilder, source: Any) -> int | float | bool | None:
    """The number that an operand is, known before the step."""
    if not isinstance(source, Node):
        return source if isinstance(source, int | float) else None
    value = builder.values.get(source)
    if isinstance(value, Known) and value.tensor.numel() == 1 and value.tensor.dtype != torch.float64:
        number: int | float | bool = value.tensor.item()
        return number
    return None


def _arithmetic(builder: PlanBuilder, node: Node, operands: tuple[Any, Any] | None = None) -> bool:
    first, second = operands or (arguments(node)[0], arguments(node)[1])
    if node.kwargs.get("alpha", 1) != 1 or (len(arguments(node)) > 2 and operands is None):
        return False
    op, integer_op = ARITHMETIC[node.target]
    dtype = builder.fake(node).dtype
    on_floats = is_float(dtype)
    if not on_floats:
        if dtype != torch.int32 or integer_op is None:
            return False
        op = integer_op
    numbers = [_constant(builder, first), _constant(builder, second)]
    if None not in numbers or (not on_floats and not all(_fits(number) for number in numbers)):
        return False
    if on_floats:
        kept = numbers[1] if node.target in KEEPS_CONSTANT else _rounded_or_none(numbers[1], dtype)
        numbers = [_rounded_or_none(numbers[0], dtype), kept]
    if node.target in (aten.div.Tensor, aten.div.Scalar) and node.kwargs.get("rounding_mode") is not None:
        return False
    sources = [source for source, number in zip((first, second), numbers, strict=True) if number is None]
    join = Join(builder, node, sources)
    registers = iter([join.floats(source) if on_floats else join.register(source) for source in sources])
    values = [
        next(registers) if number is None else (float(number) if on_floats else int(number)) for number in numbers
    ]
    result = join.compute(op, *values, constants=tuple(number is not None for number in numbers))
    return join.finish(result)


def _fits(number: int | float | bool | None) -> bool:
    return number is None or (isinstance(number, int) and number in _INT32)


def _rounded(number: float, dtype: torch.dtype) -> float:
    result: float = torch.tensor(number, dtype=dtype).item()
    return result


def _rounded_or_none(number: float | None, dtype: torch.dtype) -> float | None:
    return None if number is None else _rounded(number, dtype)


def _compare(builder: PlanBuilder, node: Node) -> bool:
    first, second = arguments(node)[0], arguments(node)[1]
    common = torch.result_type(*(_typed(builder, source) for source in (first, second)))
    on_floats = is_float(common)
    numbers = [_constant(builder, first), _constant(builder, second)]
    if common not in REGISTER_DTYPES or None not in numbers or (not on_floats and not all(map(_fits, numbers))):
        return False
    sources = [source for source, number in zip((first, second), numbers, strict=True) if number is None]
    join = Join(builder, node, sources)
    registers = iter([join.floats(each) if on_floats else join.register(each) for each in sources])
    values = [
        next(registers) if number is None else (_rounded(number, common) if on_floats else int(number))
        for number in numbers
    ]
    op = COMPARISONS[node.target]
    result = join.compute(
        op if on_floats else "i" + op, *values, constants=tuple(number is not None for number in numbers)
    )
    return join.finish(result)


def _typed(builder: PlanBuilder, source: Any) -> Any:
    """An operand as torch's rules of promotion look at it."""
    return builder.fake(source).to("meta") if isinstance(source, Node) else source


def _logical(builder: PlanBuilder, node: Node) -> bool:
    first, second = arguments(node)[0], arguments(node)[1]
    dtypes = {builder.fake(source).dtype for source in node.all_input_nodes}
    same = dtypes == {builder.fake(node).dtype} and dtypes <= {torch.bool, torch.int32}
    number = _constant(builder, second)
    if not same or _constant(builder, first) is not None or not _fits(number):
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
    if not isinstance(source, Node) or _constant(builder, source) is not None:
        return False
    dtype = builder.fake(node).dtype
    if not is_float(dtype):
        if op not in ("neg", "abs") or dtype != torch.int32:
            return False
        join = Join(builder, node, [source])
        return join.finish(join.compute("i" + op, join.register(source)))
    join = Join(builder, node, [source])
    return join.finish(join.compute(op, join.floats(source)))


def _reduce(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    if not isinstance(source, Node) or _constant(builder, source) is not None:
        return False
    fake, dtype = builder.fake(source), builder.fake(node).dtype
    dims: Any = arguments(node)[1] if len(arguments(node)) > 1 else node.kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(fake.dim()))
    reduced: set[int] = {dim % fake.dim() for dim in dims} if fake.dim() else set()
    real = [dim for dim in range(fake.dim()) if fake.shape[dim] != 1]
    inner = sum(dim in reduced for dim in real)
    if inner == 0 and node.target not in (aten.any.dim, aten.all.dim):  # of one element each
        return _convert(builder, node)
    if inner == 0:
        return False
    op, integer_op = REDUCING[node.target]
    on_floats = is_float(dtype)
    if not on_floats:
        op = integer_op
    if not op or (on_floats and not is_float(fake.dtype)):
        return False
    order = [dim for dim in range(fake.dim()) if dim not in reduced] + sorted(reduced)
    in_order = real == [dim for dim in order if dim in real]
    join = Join(builder, node, [source], inner=inner, order=None if in_order else order)
    result = join.group.reduce(op, join.register(source), inner)
    if node.target in MEANS:
        count = math.prod(fake.shape[dim] for dim in reduced)
        result = join.group.compute("div", (result, float(count)), (False, True), rows=True)
    return join.finish(result, rows=True)


def _convert(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    assert isinstance(source, Node)
    before, after = builder.fake(source).dtype, builder.fake(node).dtype
    if before == after:
        builder.share(node, source)
        return True
    # What int64 holds is known to fit where it is made int32.
    readable = before in REGISTER_DTYPES or (before == torch.int64 and after == torch.int32)
    if not readable or after not in REGISTER_DTYPES or isinstance(builder.values[source], Known):
        return False
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


def _copy(builder: PlanBuilder, node: Node) -> bool:
    """A contiguous copy, made if need be."""
    source = arguments(node)[0]
    assert isinstance(source, Node)
    value = builder.values[source]
    apart = node.target in COPIES and builder.writes_by_torch
    if apart or (isinstance(value, Stored) and not value.layout.is_contiguous()):
        if isinstance(value, Known):
            return False
        join = Join(builder, node, [source])
        return join.finish(join.register(source))
    builder.share(node, source)
    return True


def _where(builder: PlanBuilder, node: Node) -> bool:
    condition, first, second = arguments(node)[:3]
    return _choose(builder, node, condition, first, second)


def _masked_fill(builder: PlanBuilder, node: Node) -> bool:
    values, mask, fill = arguments(node)[:3]
    return _choose(builder, node, mask, fill, values)


def _choose(builder: PlanBuilder, node: Node, condition: Any, first: Any, second: Any) -> bool:
    dtype = builder.fake(node).dtype
    numbers = [_constant(builder, first), _constant(builder, second)]
    if _constant(builder, condition) is not None or builder.fake(condition).dtype != torch.bool:
        return False
    on_floats = is_float(dtype)
    if not on_floats and not all(map(_fits, numbers)):
        return False
    chosen = [source for source, number in zip((first, second), numbers, strict=True) if number is None]
    join = Join(builder, node, [condition, *chosen])
    test = join.register(condition)
    registers = iter([join.floats(each) if on_floats else join.register(each) for each in chosen])
    values = [
        next(registers) if number is None else (_rounded(number, dtype) if on_floats else int(number))
        for number in numbers
    ]
    constants = (*(number is not None for number in numbers), False)
    return join.finish(join.compute("where", *values, test, constants=constants))


def _not(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    if (
        not isinstance(source, Node)
        or builder.fake(source).dtype != torch.bool
        or _constant(builder, source) is not None
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
    rounded = _rounded(exponent, builder.fake(node).dtype)
    return join.finish(join.compute("pow", x, rounded, constants=(False, True)))


def _rsub(builder: PlanBuilder, node: Node) -> bool:
    first, second = arguments(node)[:2]
    number = _constant(builder, second)
    if len(arguments(node)) > 2 or node.kwargs or number is None or not is_float(builder.fake(node).dtype):
        return False
    assert isinstance(first, Node)
    join = Join(builder, node, [first])
    rounded = _rounded(number, builder.fake(node).dtype)
    return join.finish(join.compute("sub", rounded, join.floats(first), constants=(True, False)))


def _clamp(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    if not isinstance(source, Node) or _constant(builder, source) is not None:
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
    if not on_floats and not all(bound is None or _fits(bound) for bound in bounds):
        return False
    join = Join(builder, node, [source])
    register = join.register(source)
    for op, bound in zip(("max", "min"), bounds, strict=True):
        if bound is not None:
            number = _rounded(bound, dtype) if on_floats else int(bound)
            register = join.compute(op if on_floats else "i" + op, register, number, constants=(False, True))
    return join.finish(register)


def _softmax(builder: PlanBuilder, node: Node) -> bool:
    source, dim = arguments(node)[0], arguments(node)[1]
    fake = builder.fake(source)
    size = len(squeezed(fake.shape[-1:]))
    if dim not in (-1, fake.dim() - 1) or not size or not is_float(builder.fake(node).dtype):
        return False
    assert isinstance(source, Node)
    if not is_float(fake.dtype):
        return False
    join = Join(builder, node, [source], inner=1)
    group = join.group
    x = join.register(source)
    largest = group.spread(group.reduce("row_max", x, 1))
    weights = group.compute("exp", (group.compute("sub", (x, largest)),))
    total = group.spread(group.reduce("sum", weights, 1))
    return join.finish(group.compute("div", (weights, total)), rows=False)


def _layer_norm(builder: PlanBuilder, node: Node) -> bool:
    source, shape, weight, bias, epsilon = [*arguments(node), None, None, 1e-5][:5]
    assert isinstance(source, Node)
    fake = builder.fake(source)
    inner = len(squeezed(shape))
    if inner != 1 or not is_float(fake.dtype) or squeezed(fake.shape[-1:]) != squeezed(shape):
        return False
    parameters = [each for each in (weight, bias) if each is not None]
    join = Join(builder, node, [source, *parameters], inner=inner)
    group, count = join.group, float(math.prod(shape))

    def mean(register: int) -> int:
        total = group.reduce("sum", register, inner)
        return group.compute("div", (total, count), (False, True), rows=True)

    x = join.register(source)
    centered = group.compute("sub", (x, group.spread(mean(x))))
    variance = mean(group.compute("mul", (centered, centered)))
    scale = group.compute(
        "rsqrt", (group.compute("add", (variance, float(epsilon)), (False, True), rows=True),), rows=True
    )
    result = group.compute("mul", (centered, group.spread(scale)))
    if weight is not None:
        result = group.compute("mul", (result, join.register(weight)))
    if bias is not None:
        result = group.compute("add", (result, join.register(bias)))
    return join.finish(result, rows=False)


def _softplus(builder: PlanBuilder, node: Node) -> bool:
    return len(arguments(node)) == 1 and not node.kwargs and _unary(builder, node, "softplus")


_SPECIAL: dict[Any, Any] = {
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
    aten.square.default: lambda builder, node: _square(builder, node),
    aten.rsub.Scalar: _rsub,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: _clamp,
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.layer_norm.default: _layer_norm,
    aten.softplus.default: _softplus,
}


def _square(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    assert isinstance(source, Node)
    join = Join(builder, node, [source])
    x = join.floats(source)
    return join.finish(join.compute("mul", x, x))
