# SPDX-License-Identifier: Apache-2.0
"""Values of a graph that becomes a plan, and the groups of elementwise operators and reductions that become one Map.

Operators join a group while their results have its shape, or that of its rows once there is a reduction. What the group
reads is in memory before it begins, so a group can be emitted at any time; it is when something else needs what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.fx import Node

from ..run.memory import dtype_name
from ..steps.operands import BufferKind, Operand
from ..steps.steps import Item, Map


# Beyond this, a group's registers would leave the caches.
_MAX_ITEMS = 160
_ROUNDING = {torch.bfloat16: "round_bfloat16", torch.float16: "round_float16"}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# What registers can hold; int64 is read as int32, where it is known to fit.
REGISTER_DTYPES = (*FLOATS, torch.int32, torch.bool)


@dataclass(eq=False)
class PlannedBuffer:
    """A buffer that the plan will have, with its number there."""

    index: int
    kind: BufferKind
    name: str
    bytes: int


@dataclass(frozen=True, eq=False)
class StoredValue:
    """A tensor in memory; `layout` is a meta tensor with its shape, strides and offset."""

    memory: PlannedBuffer
    layout: Tensor

    def as_operand(self) -> Operand:
        layout = self.layout
        place = int(layout.storage_offset())
        return Operand(self.memory.index, dtype_name(layout.dtype), place, tuple(layout.shape), tuple(layout.stride()))


@dataclass(frozen=True, eq=False)
class KnownValue:
    """A tensor that is known before any step runs."""

    tensor: Tensor


@dataclass(eq=False)
class Pending:
    """A register of a group that has yet to be emitted, with one element per row of the group where `rows` says so.

    `home` is where it will be stored, if it will. All `nodes` have this value: views that change no element's place share it.
    """

    group: Group
    register: int
    rows: bool
    dtype: torch.dtype
    home: PlannedBuffer | None = None
    nodes: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class Constant:
    """A number that an operator of a group takes in the place of a register."""

    number: float


def contiguous(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the layout of a contiguous tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


def squeezed(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


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
        self._loads: dict[tuple[Operand, bool], int] = {}
        self._spread: dict[int, int] = {}

    @property
    def outer(self) -> tuple[int, ...]:
        """The shape of the group's rows."""
        return self.domain[: len(self.domain) - (self.inner or 0)]

    def can_join(self, inner: int | None) -> bool:
        """Return whether an operator may join, or a reduction of so many dimensions."""
        fits = inner is None or (inner > 0 and self.inner in (None, inner))
        return fits and len(self._items) < _MAX_ITEMS

    def takes_rows(self, own: torch.Size, shape: torch.Size) -> bool:
        """Return whether a tensor with an element per row, of shape `own`, meets the group's elements in `shape` row by row."""
        padded = (1,) * (len(shape) - len(own)) + tuple(own)
        meeting = [size for size, whole in zip(padded, shape, strict=True) if whole != 1]
        return tuple(meeting) == self.outer + (1,) * (self.inner or 0)

    def load_value(self, value: StoredValue, shape: torch.Size, *, rows: bool) -> int:
        """Return a register with a tensor in memory, broadcast to `shape`."""
        fewer = value.layout.dim() > len(shape)  # without its dimensions of size 1
        layout = value.layout.view(shape) if fewer else value.layout.expand(shape)
        access = _squeezed_access(StoredValue(value.memory, layout))
        if (access, rows) not in self._loads:
            self._loads[access, rows] = self.compute("load", rows=rows, access=access)
            self.read.add(value.memory)
        return self._loads[access, rows]

    def store_register(self, register: int, place: StoredValue, *, rows: bool) -> None:
        """Write a register to a tensor of the group's shape, or of its rows'."""
        self._items.append(Item("store", -1, (register,), (False,), rows, _squeezed_access(place)))
        self.written.add(place.memory)

    def reduce(self, op: str, register: int, inner: int) -> int:
        self.inner = inner
        return self.compute(op, register, rows=True)

    def rotate(self, register: int) -> int:
        """Return a register with each row's second half negated, and then its first."""
        self.inner = 1
        return self.compute("rotate_half", register)

    def spread(self, register: int) -> int:
        """Return a register of all elements for one of rows."""
        if register not in self._spread:
            self._spread[register] = self.compute("spread", register)
        return self._spread[register]

    def rounded(self, register: int, dtype: torch.dtype, *, rows: bool) -> int:
        """Return a register of float32 numbers rounded to another type."""
        return self.compute(_ROUNDING[dtype], register, rows=rows) if dtype in _ROUNDING else register

    def compute(self, op: str, *operands: int | Constant, rows: bool = False, access: Operand | None = None) -> int:
        """Return the register of an operator's result."""
        numbers = tuple(each.number if isinstance(each, Constant) else each for each in operands)
        constants = tuple(isinstance(each, Constant) for each in operands)
        self._items.append(Item(op, self._count, numbers, constants, rows, access))
        self._count += 1
        return self._count - 1

    def finish_map(self) -> Map | None:
        """Return the Map; None where none of its results is needed, or has elements."""
        self.closed = True
        needed: set[int] = set()
        items = []
        for item in reversed(self._items):
            if item.op == "store" or item.to in needed:
                items.append(item)
                needed.update(_registers_of(item))
        if not items or 0 in self.domain:
            return None
        rows = math.prod(self.outer) if self.inner else 1
        registers, assigned = _assign_registers(items[::-1])
        return Map(rows, math.prod(self.domain) // rows, registers, assigned)


def _squeezed_access(place: StoredValue) -> Operand:
    """Return a tensor without its dimensions of size 1."""
    access = place.as_operand()
    kept = [dim for dim, size in enumerate(access.shape) if size != 1]
    strides = tuple(access.strides[dim] for dim in kept)
    return replace(access, shape=tuple(access.shape[dim] for dim in kept), strides=strides)


def _registers_of(item: Item) -> list[int]:
    return [int(each) for each, constant in zip(item.operands, item.constants, strict=True) if not constant]


def _assign_registers(items: list[Item]) -> tuple[int, tuple[Item, ...]]:
    """Share registers between values that are not needed at once. An item never writes a register that it reads."""
    last_use = {register: index for index, item in enumerate(items) for register in _registers_of(item)}
    free: list[int] = []
    place: dict[int, int] = {}
    count, assigned = 0, []
    for index, item in enumerate(items):
        operands = tuple(
            value if constant else place[int(value)]
            for value, constant in zip(item.operands, item.constants, strict=True)
        )
        if item.op != "store":
            place[item.to] = free.pop() if free else count
            count = max(count, place[item.to] + 1)
        assigned.append(replace(item, to=-1 if item.op == "store" else place[item.to], operands=operands))
        for register in {*_registers_of(item)}:
            if last_use[register] == index:
                free.append(place[register])
    return count, tuple(assigned)
