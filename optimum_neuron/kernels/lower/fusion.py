# SPDX-License-Identifier: Apache-2.0
"""Groups of elementwise operators and reductions that become one Map.

Operators join a group while their results have its shape, or that of its rows once there is a reduction. What the group
reads is in memory before it begins, so a group can be emitted at any time; it is when something else needs what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from ..steps.steps import Item, Map, Operand
from .values import PlannedBuffer, StoredValue, operand


# Beyond this, a group's registers would leave the caches.
_MAX_ITEMS = 160
_ROUNDING = {torch.bfloat16: "round_bfloat16", torch.float16: "round_float16"}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# What registers can hold; int64 is read as int32, where it is known to fit.
REGISTER_DTYPES = (*_FLOATS, torch.int32, torch.bool)


def squeezed(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def is_float(dtype: torch.dtype) -> bool:
    return dtype in _FLOATS


@dataclass(eq=False)
class Pending:
    """A register of a group that has yet to be emitted.

    Attributes:
        rows: whether it has one element per row of the group.
        home: where it will be stored, if it will.
        nodes: that have this value: views that change no element's place share it.
    """

    group: Group
    register: int
    rows: bool
    dtype: torch.dtype
    home: PlannedBuffer | None = None
    nodes: list[Node] = field(default_factory=list)


class Group:
    """A Map in the making, in static single assignment; `finish_map` assigns registers."""

    def __init__(self, domain: tuple[int, ...]) -> None:
        self.domain = domain
        self.inner: int | None = None  # how many of the last dimensions are reduced
        self.closed = False
        self.pending: list[Pending] = []
        self.written: set[PlannedBuffer] = set()
        self.read: set[PlannedBuffer] = set()
        self._items: list[Item] = []
        self._count = 0
        self._loads: dict[tuple[int, torch.dtype, int, tuple[int, ...], bool], int] = {}
        self._spread: dict[int, int] = {}

    @property
    def outer(self) -> tuple[int, ...]:
        """The shape of the group's rows."""
        return self.domain[: len(self.domain) - (self.inner or 0)]

    @property
    def is_full(self) -> bool:
        return len(self._items) >= _MAX_ITEMS

    def can_reduce(self, inner: int) -> bool:
        return inner > 0 and self.inner in (None, inner)

    def takes_rows(self, own: torch.Size, shape: torch.Size) -> bool:
        """Return whether a tensor with an element per row, of shape `own`, meets the group's elements in `shape` row by row."""
        padded = (1,) * (len(shape) - len(own)) + tuple(own)
        meeting = [size for size, whole in zip(padded, shape, strict=True) if whole != 1]
        return tuple(meeting) == self.outer + (1,) * (self.inner or 0)

    def load_value(self, value: StoredValue, shape: torch.Size, *, rows: bool) -> int:
        """Return a register with a tensor in memory, broadcast to `shape`."""
        fewer = value.layout.dim() > len(shape)  # without its dimensions of size 1
        layout = value.layout.view(shape) if fewer else value.layout.expand(shape)
        sizes = [size for size in shape if size != 1]
        strides = [stride for size, stride in zip(shape, layout.stride(), strict=True) if size != 1]
        key = (value.memory.index, layout.dtype, int(layout.storage_offset()), tuple(strides), rows)
        if key not in self._loads:
            access = operand(value.memory, layout)
            access = Operand(access.buffer, access.dtype, access.offset, tuple(sizes), tuple(strides))
            self._loads[key] = self._append("load", access=access, rows=rows)
            self.read.add(value.memory)
        return self._loads[key]

    def store_register(self, register: int, memory: PlannedBuffer, layout: Tensor, *, rows: bool) -> None:
        """Write a register to a tensor of the group's shape, or of its rows'."""
        full = operand(memory, layout)
        kept = [i for i, size in enumerate(layout.shape) if size != 1]
        access = Operand(
            full.buffer,
            full.dtype,
            full.offset,
            tuple(full.shape[i] for i in kept),
            tuple(full.strides[i] for i in kept),
        )
        self._items.append(Item("store", -1, (register,), (False,), rows, access))
        self.written.add(memory)

    def compute(
        self, op: str, operands: Sequence[int | float], constants: Sequence[bool] = (), *, rows: bool = False
    ) -> int:
        return self._append(op, tuple(operands), tuple(constants) or (False,) * len(operands), rows=rows)

    def reduce(self, op: str, register: int, inner: int) -> int:
        self.inner = inner
        return self.compute(op, (register,), rows=True)

    def rotate(self, register: int) -> int:
        """Return a register with each row's second half negated, and then its first."""
        self.inner = 1
        return self.compute("rotate_half", (register,))

    def spread(self, register: int) -> int:
        """Return a register of all elements for one of rows."""
        if register not in self._spread:
            self._spread[register] = self.compute("spread", (register,))
        return self._spread[register]

    def rounded(self, register: int, dtype: torch.dtype, *, rows: bool) -> int:
        """Return a register of float32 numbers rounded to another type."""
        return self.compute(_ROUNDING[dtype], (register,), rows=rows) if dtype in _ROUNDING else register

    def add_pending(self, register: int, dtype: torch.dtype, *, rows: bool) -> Pending:
        value = Pending(self, register, rows, dtype)
        self.pending.append(value)
        return value

    def _append(
        self,
        op: str,
        operands: tuple[int | float, ...] = (),
        constants: tuple[bool, ...] = (),
        *,
        rows: bool,
        access: Operand | None = None,
    ) -> int:
        register = self._count
        self._count += 1
        self._items.append(Item(op, register, operands, constants, rows, access))
        return register

    def finish_map(self) -> Map | None:
        """Return the Map; None where none of its results is needed, or has elements."""
        self.closed = True
        items = _find_live(self._items)
        if not items or 0 in self.domain:
            return None
        inner = self.inner or 0
        rows = math.prod(self.outer) if inner else 1
        registers, assigned = _assign_registers(items)
        return Map(rows, math.prod(self.domain) // rows, registers, assigned)


def _registers_of(item: Item) -> list[int]:
    return [
        int(value)
        for value, constant in zip(item.operands, item.constants, strict=True)
        if not constant and value is not None
    ]


def _find_live(items: list[Item]) -> list[Item]:
    """List the items on which a store depends."""
    needed: set[int] = set()
    live = []
    for item in reversed(items):
        if item.op == "store" or item.to in needed:
            live.append(item)
            needed.update(_registers_of(item))
    return live[::-1]


def _assign_registers(items: list[Item]) -> tuple[int, tuple[Item, ...]]:
    """Share registers between values that are not needed at once. An item never writes a register that it reads."""
    last_use = {register: index for index, item in enumerate(items) for register in _registers_of(item)}
    free: list[int] = []
    place: dict[int, int] = {}
    count, assigned = 0, []
    for index, item in enumerate(items):
        operands = tuple(
            value if constant else place[int(value)]  # type: ignore[arg-type]
            for value, constant in zip(item.operands, item.constants, strict=True)
        )
        target = -1
        if item.op != "store":
            if free:
                target = free.pop()
            else:
                target, count = count, count + 1
            place[item.to] = target
        assigned.append(Item(item.op, target, operands, item.constants, item.rows, item.access))
        for register in {*_registers_of(item)}:
            if last_use[register] == index:
                free.append(place[register])
    return count, tuple(assigned)
