# SPDX-License-Identifier: Apache-2.0
"""A plan in the making: its buffers, the values of the nodes so far, and its steps.

Between two Maps a number of bfloat16 or float16 stays in float32, in registers and in memory alike, and is rounded where a kernel
takes it. So what is rounded does not depend on which operators share a Map.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..steps.operands import BufferKind
from ..steps.steps import Step
from .fusion import Group, KnownValue, Pending, PlannedBuffer, StoredValue, contiguous, squeezed
from .pointwise import ALIASES, JOINING, VIEWS


_FEWER_BITS = (torch.bfloat16, torch.float16)
_PASSING = VIEWS | ALIASES | JOINING | {operator.getitem}


def arguments(node: Node) -> tuple[Any, ...]:
    """Return a node's operands and options; their types depend on its operator."""
    return node.args


def option(node: Node, place: int, name: str, default: Any = None) -> Any:
    """Return an option of a node by its place or its name, or its default."""
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


class PlanBuilder:
    """A plan in the making. Values are in memory, in registers of open groups, or known; a group is emitted when its results are needed.

    Attributes:
        values: of nodes; of a node with several results, a list.
        live: nodes with results that are needed; the others are left out.
        of_live: holds which tokens reach the model's head: of live rows, live ones.
        written: nodes with memory that a copy writes to: they have their own type there, and are rounded to it in
            registers. Where there are any, a copy must be one.
    """

    def __init__(self, live: set[Node], writers: Iterable[Node], mapped: Collection[Any]) -> None:
        """Begin an empty plan; `writers` write to their first operand, and `mapped` operators become operators of a Map."""
        self.memories: list[PlannedBuffer] = []
        self.values: dict[Node, Any] = {}
        self.steps: list[Step] = []
        self.constants: dict[str, Tensor] = {}
        self.live, self._mapped = live, mapped
        self.of_live: set[PlannedBuffer] = set()
        self.temporary: BufferKind = "arena"  # what new buffers are
        self._open: list[Group] = []
        self._stored_constants: dict[int, StoredValue] = {}
        self._equal_constants: dict[tuple[torch.dtype, torch.Size, bytes], StoredValue] = {}
        self._rounded: dict[tuple[Any, ...], StoredValue] = {}
        self.written: set[Node] = set()
        for writer in writers:
            node = writer.args[0]
            while isinstance(node, Node) and node not in self.written:
                self.written.add(node)
                same = node.target in VIEWS or node.target in ALIASES
                node = node.args[0] if same else None

    def memory(self, kind: BufferKind, name: str, size: int) -> PlannedBuffer:
        memory = PlannedBuffer(len(self.memories), kind, name, size)
        self.memories.append(memory)
        return memory

    def allocate(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> StoredValue:
        """Return a new contiguous tensor."""
        memory = self.memory(self.temporary, "", math.prod(shape) * dtype.itemsize)
        return StoredValue(memory, contiguous(tuple(shape), dtype))

    def allocate_like(self, node: Node) -> StoredValue:
        """Return new memory for a node's result."""
        return self.allocate(self.fake(node).shape, self.fake(node).dtype)

    def allocate_wide(self, node: Node, shape: torch.Size) -> StoredValue:
        """Return new memory for what a Map stores of a node: in float32 where it stays so for later Maps."""
        return self.allocate(shape, torch.float32 if self.is_wide(node) else self.fake(node).dtype)

    def is_wide(self, node: Node) -> bool:
        """Return whether a node's value stays in float32 for a later Map, though its type has fewer bits."""
        value = self.fake_or_none(node)
        if value is None or value.dtype not in _FEWER_BITS or node in self.written or self.temporary == "kept":
            return False
        return any(self._is_for_maps(user) for user in node.users if self._is_to_come(user))

    def _is_for_maps(self, user: Node) -> bool:
        if user.op == "output" or user.target in self._mapped:
            return True
        return user.target in _PASSING and any(self._is_for_maps(each) for each in user.users if each in self.live)

    def fake(self, node: Node) -> Tensor:
        value: Tensor = node.meta["val"]
        return value

    def fake_or_none(self, node: Node) -> Tensor | None:
        """Return None where a node has several results, or none."""
        value = node.meta.get("val")
        return value if isinstance(value, Tensor) else None

    def share(self, node: Node, source: Node) -> None:
        """Give a node the value of another, element for element."""
        value = self.values[source]
        if isinstance(value, Pending):
            value.nodes.append(node)
        elif isinstance(value, StoredValue):  # dimensions of size 1 may come and go
            value = StoredValue(value.memory, value.layout.view(self.fake(node).shape))
        self.values[node] = value

    # Values

    def stored(self, node: Node) -> StoredValue:
        """Return a node's value in memory and in its own type, and emit the group that computes it."""
        value = self.loadable(node)
        dtype, layout = self.fake(node).dtype, value.layout
        if layout.dtype == dtype:
            return value
        # What Maps left in float32: contiguous, and rounded here alone.
        key = (value.memory, layout.storage_offset(), tuple(layout.shape), tuple(layout.stride()))
        if key not in self._rounded:
            self._rounded[key] = self.contiguous_copy(value, dtype)
        return self._rounded[key]

    def loadable(self, node: Node) -> StoredValue:
        """Return a node's value for a Map: numbers of fewer bits may be in float32, not yet rounded."""
        value = self.resting(node)
        self.complete_buffer(value.memory)
        return value

    def resting(self, node: Node) -> StoredValue:
        """Return a node's value in memory, which an open group may have yet to write."""
        value: StoredValue | Pending | KnownValue = self.values[node]
        if isinstance(value, StoredValue):
            return value
        if isinstance(value, KnownValue):
            return self._constant(value.tensor)
        fake = self.fake(node)
        home = value.home or self._give_home(value, fake)
        return StoredValue(home, contiguous(fake.shape, value.dtype))

    def _give_home(self, value: Pending, fake: Tensor) -> PlannedBuffer:
        assert not value.group.closed, value
        if any(map(self.is_wide, value.nodes)):
            value.dtype = torch.float32
        place = self.allocate(fake.shape, value.dtype)
        value.home = place.memory
        value.group.store_register(value.register, place, rows=value.rows)
        return place.memory

    def contiguous(self, node: Node, dtype: torch.dtype | None = None) -> StoredValue:
        """Return a node's value in memory, contiguous and of its own type or another: copied where it is not."""
        value = self.stored(node)
        fits = value.layout.is_contiguous() and dtype in (None, value.layout.dtype)
        return value if fits else self.contiguous_copy(value, dtype)

    def expanded(self, node: Node, shape: Sequence[int]) -> StoredValue:
        """Return a node's value expanded to a shape, contiguous and in float32: copied where it is not."""
        value = self.stored(node)
        whole = StoredValue(value.memory, value.layout.expand(shape))
        fits = whole.layout.dtype == torch.float32 and whole.layout.is_contiguous()
        return whole if fits else self.contiguous_copy(whole, torch.float32)

    def contiguous_copy(self, value: StoredValue, dtype: torch.dtype | None = None) -> StoredValue:
        """Return a contiguous copy, of a type that a Map has."""
        group, _ = self.group_of(value.layout.shape, [])
        output = self.allocate(value.layout.shape, dtype or value.layout.dtype)
        register = group.load_value(value, value.layout.shape, rows=False)
        group.store_register(register, output, rows=False)
        self.complete_buffer(output.memory)
        return output

    def _constant(self, tensor: Tensor) -> StoredValue:
        # By the object, which `values` keeps alive; equal ones, as of layers that are the same, are stored once.
        if id(tensor) not in self._stored_constants:
            kept = tensor.detach().contiguous()
            key = (kept.dtype, kept.shape, kept.flatten().view(torch.uint8).numpy().tobytes() if kept.numel() else b"")
            if key not in self._equal_constants:
                name = f"constant_{len(self.constants)}"
                self.constants[name] = kept
                memory = self.memory("constant", name, kept.numel() * kept.dtype.itemsize)
                self._equal_constants[key] = StoredValue(memory, contiguous(kept.shape, kept.dtype))
            self._stored_constants[id(tensor)] = self._equal_constants[key]
        return self._stored_constants[id(tensor)]

    # Groups

    def complete_buffer(self, memory: PlannedBuffer) -> None:
        """Emit the groups that have yet to write to a buffer."""
        for group in [group for group in self._open if memory in group.written]:
            self.close_group(group)

    def close_group(self, group: Group) -> None:
        if group.closed:
            return
        self._open.remove(group)
        for value in group.pending:
            read_later = (node for node in value.nodes if any(map(self._is_to_come, node.users)))
            if value.home is None and (node := next(read_later, None)) is not None:
                self._give_home(value, self.fake(node))
        step = group.finish_map()
        if step is not None:
            self.steps.append(step)

    def _is_to_come(self, node: Node) -> bool:
        return node in self.live and node not in self.values

    def before_writing(self, memory: PlannedBuffer) -> None:
        """Emit the groups that have yet to read a buffer, or to write to it."""
        for group in [group for group in self._open if memory in group.read]:
            self.close_group(group)
        self.complete_buffer(memory)

    def close_groups(self) -> None:
        for group in list(self._open):
            self.close_group(group)

    def group_of(self, shape: torch.Size, operands: list[Node], *, inner: int | None = None) -> tuple[Group, bool]:
        """Return the group that an operator joins, and whether it computes per row there; emit operands that are pending in others.

        The shape is that of the operator's result; of a reduction of the last `inner` dimensions, that of its operand.
        """
        own = squeezed(shape)
        pending = [(node, value) for node in operands if isinstance(value := self.values.get(node), Pending)]
        groups = sorted({value.group for _, value in pending if not value.group.closed}, key=self._open.index)
        candidates = groups[::-1] + self._open[-1:]
        chosen, rows = None, False
        for group in candidates:
            if not group.can_join(inner):
                continue
            row_shapes = [self.fake(node).shape for node, value in pending if value.rows and value.group is group]
            if own == group.domain and all(group.takes_rows(each, shape) for each in row_shapes):
                chosen = group
                break
            if inner is None and group.inner and own == group.outer and row_shapes:
                chosen, rows = group, True
                break
        if chosen is None:
            chosen = Group(own)
            self._open.append(chosen)
        for group in groups:
            if group is not chosen:
                self.close_group(group)
        for node in operands:
            # What the group is to load must be written before the group begins.
            value = self.values.get(node)
            if isinstance(value, StoredValue):
                if value.memory in chosen.written:
                    self.close_group(chosen)
                    return self.group_of(shape, operands, inner=inner)
                self.complete_buffer(value.memory)
        return chosen, rows
