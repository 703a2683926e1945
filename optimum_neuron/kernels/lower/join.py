# SPDX-License-Identifier: Apache-2.0
"""Nodes that join a group, the numbers among their operands; and reductions, softmax and norms.

The functions that lower a node return False where a Map cannot compute it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from .builder import PlanBuilder, arguments, option
from .fusion import FLOATS, Constant, KnownValue, Pending, StoredValue, squeezed
from .pointwise import MEANS, REDUCING, aten


_INT32 = range(-(2**31), 2**31)


class Join:
    """A node that joins a group, with its operands there."""

    def __init__(
        self,
        builder: PlanBuilder,
        node: Node,
        operands: list[Node],
        *,
        inner: int | None = None,
        order: list[int] | None = None,
    ) -> None:
        """Find the group.

        A reduction of the first operand takes `inner` dimensions of more than one element, in this `order` the last.
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
            stored = StoredValue(stored.memory, stored.layout.permute(self.order))
        return self.group.load_value(stored, self.shape, rows=self.rows)

    def floats(self, source: Node) -> int:
        register = self.register(source)
        return register if self.builder.fake(source).dtype in FLOATS else self.compute("to_float", register)

    def operands(
        self, sources: Sequence[Any], numbers: Iterable[Constant | None], dtype: torch.dtype
    ) -> list[int | Constant]:
        """Return a register of each source, of floats where `dtype` is a type of floats, or its number."""
        own = self.floats if dtype in FLOATS else self.register
        return [own(source) if number is None else number for source, number in zip(sources, numbers, strict=True)]

    def compute(self, op: str, *operands: int | Constant) -> int:
        return self.group.compute(op, *operands, rows=self.rows)

    def finish(self, register: int, *, rows: bool | None = None) -> bool:
        rows = self.rows if rows is None else rows
        dtype = self.builder.fake(self.node).dtype
        if self.node in self.builder.written:  # later readers get it from memory
            register = self.group.rounded(register, dtype, rows=rows)
        value = Pending(self.group, register, rows, dtype, nodes=[self.node])
        self.group.pending.append(value)
        self.builder.values[self.node] = value
        return True


def constant(builder: PlanBuilder, source: Any) -> float | None:
    """Return the number that an operand is before any step runs; None where it is none."""
    if not isinstance(source, Node):
        return source if isinstance(source, int | float) else None
    value = builder.values.get(source)
    if isinstance(value, KnownValue) and value.tensor.numel() == 1 and value.tensor.dtype != torch.float64:
        return value.tensor.item()
    return None


def read_numbers(
    builder: PlanBuilder, sources: Sequence[Any], dtype: torch.dtype, exact: Collection[int] = ()
) -> list[Constant | None] | None:
    """Return the numbers among operands, as operators on a type take them, or None where one is no number of int32.

    Torch does not round those at the places `exact` to the type.
    """
    numbers = [constant(builder, source) for source in sources]
    if dtype not in FLOATS:
        fit = all(each is None or (isinstance(each, int) and each in _INT32) for each in numbers)
        return [None if each is None else Constant(int(each)) for each in numbers] if fit else None
    return [
        None if each is None else Constant(float(each if place in exact else torch.tensor(each, dtype=dtype).item()))
        for place, each in enumerate(numbers)
    ]


def reduced_dims(builder: PlanBuilder, node: Node) -> set[int]:
    """Return the dimensions that a reduction takes, of those with more than one element."""
    shape = builder.fake(arguments(node)[0]).shape
    dims = option(node, 1, "dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(len(shape)))
    return {dim % len(shape) for dim in dims if shape[dim] != 1} if shape else set()


def lower_reduction(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    if constant(builder, source) is not None:
        return False
    fake = builder.fake(source)
    reduced = reduced_dims(builder, node)
    on_floats = builder.fake(node).dtype in FLOATS
    op = REDUCING[node.target][0 if on_floats else 1]
    if not op or (on_floats and fake.dtype not in FLOATS):
        return False
    order = [dim for dim in range(fake.dim()) if dim not in reduced] + sorted(reduced)
    real = [dim for dim in order if fake.shape[dim] != 1]
    join = Join(builder, node, [source], inner=len(reduced), order=None if real == sorted(real) else order)
    result = join.group.reduce(op, join.register(source), len(reduced))
    if node.target in MEANS:
        count = float(math.prod(fake.shape[dim] for dim in reduced))
        result = join.group.compute("div", result, Constant(count), rows=True)
    return join.finish(result, rows=True)


def lower_softmax(builder: PlanBuilder, node: Node) -> bool:
    source, dim = arguments(node)[0], arguments(node)[1]
    fake = builder.fake(source)
    on_floats = fake.dtype in FLOATS and builder.fake(node).dtype in FLOATS
    if dim not in (-1, fake.dim() - 1) or not on_floats:
        return False
    is_row = bool(squeezed(fake.shape[-1:]))
    join = Join(builder, node, [source], inner=1) if is_row else Join(builder, node, [source])
    group, x = join.group, join.register(source)
    if not is_row:  # one number: 1 where it is finite, and NaN elsewhere
        weight = join.compute("exp", join.compute("sub", x, x))
        return join.finish(join.compute("div", weight, weight))
    largest = group.spread(group.reduce("row_max", x, 1))
    weights = group.compute("exp", group.compute("sub", x, largest))
    total = group.spread(group.reduce("sum", weights, 1))
    return join.finish(group.compute("div", weights, total), rows=False)


def lower_norm(builder: PlanBuilder, node: Node) -> bool:
    """Lower `layer_norm` and `rms_norm` of the last dimension."""
    is_centered = node.target is aten.layer_norm.default
    source, shape, weight = (*arguments(node), None)[:3]
    bias = option(node, 3, "bias") if is_centered else None
    epsilon = option(node, 4, "eps", 1e-5) if is_centered else option(node, 3, "eps")
    fake = builder.fake(source)
    own = squeezed(shape)
    if len(own) != 1 or fake.dtype not in FLOATS or squeezed(fake.shape[-1:]) != own or epsilon is None:
        return False
    join = Join(builder, node, [source, *(each for each in (weight, bias) if each is not None)], inner=1)
    group, count = join.group, Constant(float(own[0]))

    def mean(register: int) -> int:
        return group.compute("div", group.reduce("sum", register, 1), count, rows=True)

    x = join.register(source)
    result = group.compute("sub", x, group.spread(mean(x))) if is_centered else x
    variance = mean(group.compute("mul", result, result))
    shifted = group.compute("add", variance, Constant(float(epsilon)), rows=True)
    result = group.compute("mul", result, group.spread(group.compute("rsqrt", shifted, rows=True)))
    for op, parameter in (("mul", weight), ("add", bias)):
        if parameter is not None:
            result = group.compute(op, result, join.register(parameter))
    return join.finish(result, rows=False)
