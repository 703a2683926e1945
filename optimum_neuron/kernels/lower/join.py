# SPDX-License-Identifier: Apache-2.0
"""Nodes that join a group, and the numbers among their operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from .builder import PlanBuilder
from .fusion import Pending, is_float
from .values import KnownValue, StoredValue


_INT32 = range(-(2**31), 2**31)
Number = int | float | bool


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
            stored = StoredValue(stored.memory, stored.layout.permute(self.order))
        return self.group.load_value(stored, self.shape, rows=self.rows)

    def floats(self, source: Node) -> int:
        register = self.register(source)
        return register if is_float(self.builder.fake(source).dtype) else self.compute("to_float", register)

    def operands(
        self, sources: Sequence[Any], numbers: Sequence[Number | None], dtype: torch.dtype
    ) -> list[int | float]:
        """Return a register of each source, or its number: floats where `dtype` is a type of floats."""
        own = self.floats if is_float(dtype) else self.register
        kind = float if is_float(dtype) else int
        return [
            own(source) if number is None else kind(number) for source, number in zip(sources, numbers, strict=True)
        ]

    def compute(self, op: str, *operands: int | float, constants: tuple[bool, ...] = ()) -> int:
        return self.group.compute(op, operands, constants, rows=self.rows)

    def finish(self, register: int, *, rows: bool | None = None) -> bool:
        rows = self.rows if rows is None else rows
        dtype = self.builder.fake(self.node).dtype
        if self.node in self.builder.uses.written:  # later readers get it from memory
            register = self.group.rounded(register, dtype, rows=rows)
        value = self.group.add_pending(register, dtype, rows=rows)
        value.nodes.append(self.node)
        self.builder.values[self.node] = value
        return True


def constant(builder: PlanBuilder, source: Any) -> Number | None:
    """Return the number that an operand is before any step runs; None where it is none."""
    if not isinstance(source, Node):
        return source if isinstance(source, int | float) else None
    value = builder.values.get(source)
    if isinstance(value, KnownValue) and value.tensor.numel() == 1 and value.tensor.dtype != torch.float64:
        number: Number = value.tensor.item()
        return number
    return None


def fits(number: Number | None) -> bool:
    """Return whether a number is None, or one of int32."""
    return number is None or (isinstance(number, int) and number in _INT32)


def rounded(number: float, dtype: torch.dtype) -> float:
    """Return a number rounded to a type."""
    result: float = torch.tensor(number, dtype=dtype).item()
    return result
