# SPDX-License-Identifier: Apache-2.0
"""Conversions and copies as operators of a Map. Each function returns False where a Map cannot compute the node."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .builder import PlanBuilder, arguments
from .fusion import REGISTER_DTYPES, is_float
from .join import Join
from .pointwise import COPIES
from .values import KnownValue, StoredValue


def lower_conversion(builder: PlanBuilder, node: Node) -> bool:
    source = arguments(node)[0]
    assert isinstance(source, Node)
    before, after = builder.fake(source).dtype, builder.fake(node).dtype
    if before == after:
        builder.share(node, source)
        return True
    # What int64 holds is known to fit where it is made int32.
    readable = before in (*REGISTER_DTYPES, torch.int8) or (before == torch.int64 and after == torch.int32)
    value = builder.values[source]
    if not readable or after not in REGISTER_DTYPES or isinstance(value, KnownValue):
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
    """Return whether a conversion, to float32 or to what Maps take unrounded, gives what a step left in float32."""
    if not isinstance(value, StoredValue) or value.memory.kind != "arena" or value.layout.dtype != torch.float32:
        return False
    taken = builder.fake(node).dtype == torch.float32 or builder.uses.are_wide(node, builder.values)
    return taken and not builder.writes_by_torch


def lower_clone(builder: PlanBuilder, node: Node) -> bool:
    """Lower a contiguous copy, made if need be."""
    source = arguments(node)[0]
    assert isinstance(source, Node)
    value = builder.values[source]
    copied = node.target in COPIES or not builder.fake(source).is_contiguous()
    apart = copied and builder.writes_by_torch
    if apart or (isinstance(value, StoredValue) and not value.layout.is_contiguous()):
        if isinstance(value, KnownValue):
            return False
        join = Join(builder, node, [source])
        return join.finish(join.register(source))
    builder.share(node, source)
    return True
