# SPDX-License-Identifier: Apache-2.0
"""Reductions, softmax and norms in a Map. Each function returns False where a Map cannot compute the node."""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from .builder import PlanBuilder, arguments
from .fusion import is_float, squeezed
from .join import Join, constant
from .pointwise import MEANS, REDUCING


def reduced_dims(builder: PlanBuilder, node: Node) -> set[int]:
    """Return the dimensions that a reduction takes, of those with more than one element."""
    shape = builder.fake(arguments(node)[0]).shape
    dims: Any = arguments(node)[1] if len(arguments(node)) > 1 else node.kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(len(shape)))
    return {dim % len(shape) for dim in dims if shape[dim] != 1} if shape else set()


def lower_reduction(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    if constant(builder, source) is not None:
        return False
    fake, dtype = builder.fake(source), builder.fake(node).dtype
    reduced = reduced_dims(builder, node)
    on_floats = is_float(dtype)
    op = REDUCING[node.target][0 if on_floats else 1]
    if not op or (on_floats and not is_float(fake.dtype)):
        return False
    order = [dim for dim in range(fake.dim()) if dim not in reduced] + sorted(reduced)
    real = [dim for dim in order if fake.shape[dim] != 1]
    join = Join(builder, node, [source], inner=len(reduced), order=None if real == sorted(real) else order)
    result = join.group.reduce(op, join.register(source), len(reduced))
    if node.target in MEANS:
        count = math.prod(fake.shape[dim] for dim in reduced)
        result = join.group.compute("div", (result, float(count)), (False, True), rows=True)
    return join.finish(result, rows=True)


def lower_softmax(builder: PlanBuilder, node: Node) -> bool:
    source, dim = arguments(node)[0], arguments(node)[1]
    fake = builder.fake(source)
    size = len(squeezed(fake.shape[-1:]))
    if dim not in (-1, fake.dim() - 1) or not size or not is_float(builder.fake(node).dtype):
        return False
    if not is_float(fake.dtype):
        return False
    join = Join(builder, node, [source], inner=1)
    group = join.group
    x = join.register(source)
    largest = group.spread(group.reduce("row_max", x, 1))
    weights = group.compute("exp", (group.compute("sub", (x, largest)),))
    total = group.spread(group.reduce("sum", weights, 1))
    return join.finish(group.compute("div", (weights, total)), rows=False)


def lower_layer_norm(builder: PlanBuilder, node: Node) -> bool:
    source, shape, weight, bias, epsilon = [*arguments(node), None, None, 1e-5][:5]
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
