# SPDX-License-Identifier: Apache-2.0
"""A plan under way: its buffers, the values of the nodes seen so far, and the steps that were emitted."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..plan.program import BufferKind, Step
from ..plan.values import Known, Memory, Stored, contiguous
from .fusion import Group, Pending, squeezed
from .uses import Uses


def arguments(node: Node) -> tuple[Any, ...]:
    """A node's operands and options, of which its operator knows the types."""
    return node.args


class PlanBuilder:
    """Keeps values in memory, in registers of open groups, or known; emits groups when what they compute is needed.

    Attributes:
        values: of nodes; of a node with several results, a list.
        steps: in order.
        live: nodes whose results something needs; the others are left out.
        uses: who takes a node's value.
        of_live: holds which tokens reach the model's head: of live rows, live ones.
        writes_by_torch: whether operators of torch write to tensors of the graph: a copy must then be one.
    """

    def __init__(self, live: set[Node], uses: Uses, *, writes_by_torch: bool = False) -> None:
        self.memories: list[Memory] = []
        self.values: dict[Node, Any] = {}
        self.steps: list[Step] = []
        self.constants: dict[str, Tensor] = {}
        self.live = live
        self.uses = uses
        self.writes_by_torch = writes_by_torch
        self.of_live: set[Memory] = set()
        self.temporary: BufferKind = "arena"  # what new buffers are
        self._open: list[Group] = []
        self._stored_constants: dict[int, Stored] = {}
        self._equal_constants: dict[tuple[torch.dtype, torch.Size, bytes], Stored] = {}
        self._rounded: dict[tuple[Any, ...], Stored] = {}

    def memory(self, kind: BufferKind, name: str, size: int) -> Memory:
        memory = Memory(len(self.memories), kind, name, size)
        self.memories.append(memory)
        return memory

    def allocate(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Stored:
        """A new contiguous tensor."""
        return Stored(
            self.memory(self.temporary, "", math.prod(shape) * dtype.itemsize), contiguous(tuple(shape), dtype)
        )

    def emit(self, step: Step) -> None:
        self.steps.append(step)

    def fake(self, node: Node) -> Tensor:
        value: Tensor = node.meta["val"]
        return value

    def fake_or_none(self, node: Node) -> Tensor | None:
        """None where a node has several results, or none."""
        value = node.meta.get("val")
        return value if isinstance(value, Tensor) else None

    def share(self, node: Node, source: Node) -> None:
        """Makes a node's value another's, element for element."""
        value = self.values[source]
        if isinstance(value, Pending):
            value.nodes.append(node)
        elif isinstance(value, Stored):  # dimensions of size 1 may come and go
            value = Stored(value.memory, value.layout.view(self.fake(node).shape))
        self.values[node] = value

    # Values

    def stored(self, node: Node) -> Stored:
        """A node's value in memory and in its own type, where it is complete: whoever computes it is emitted."""
        value = self.loadable(node)
        dtype = self.fake(node).dtype
        return value if value.layout.dtype == dtype else self._in_type(value, dtype)

    def loadable(self, node: Node) -> Stored:
        """The same for a Map: numbers of fewer bits may be in float32, not yet rounded."""
        value = self.resting(node)
        self.complete(value.memory)
        return value

    def resting(self, node: Node) -> Stored:
        """A node's value in memory, which an open group may have yet to write."""
        value: Stored | Pending | Known = self.values[node]
        if isinstance(value, Stored):
            return value
        if isinstance(value, Known):
            return self._constant(value.tensor)
        fake = self.fake(node)
        if value.home is None:
            assert not value.group.closed, node
            self._give_home(value, fake)
        assert value.home is not None
        return Stored(value.home, contiguous(fake.shape, value.dtype))

    def _give_home(self, value: Pending, fake: Tensor) -> None:
        if any(self.uses.are_wide(node, self.values) for node in value.nodes):
            value.dtype = torch.float32
        value.home = self.memory(self.temporary, "", fake.numel() * value.dtype.itemsize)
        value.group.store(value.register, value.home, contiguous(fake.shape, value.dtype), rows=value.rows)

    def _in_type(self, value: Stored, dtype: torch.dtype) -> Stored:
        """A value that Maps left in float32, as who is no Map takes it: contiguous, and rounded here alone."""
        key = (value.memory, value.layout.storage_offset(), tuple(value.layout.shape), tuple(value.layout.stride()))
        if key not in self._rounded:
            self._rounded[key] = self.contiguous_copy(value, dtype)
        return self._rounded[key]

    def contiguous_copy(self, value: Stored, dtype: torch.dtype | None = None) -> Stored:
        """A copy whose elements lie side by side, of a type that a Map has."""
        group, _ = self.group_of(value.layout.shape, [])
        output = self.allocate(value.layout.shape, dtype or value.layout.dtype)
        register = group.load(value, value.layout.shape, rows=False)
        group.store(register, output.memory, output.layout, rows=False)
        self.complete(output.memory)
        return output

    def _constant(self, tensor: Tensor) -> Stored:
        # By the object, which `values` keeps alive; equal ones, as of layers that are the same, are stored once.
        if id(tensor) not in self._stored_constants:
            kept = tensor.detach().contiguous()
            key = (kept.dtype, kept.shape, kept.flatten().view(torch.uint8).numpy().tobytes() if kept.numel() else b"")
            if key not in self._equal_constants:
                name = f"constant_{len(self.constants)}"
                self.constants[name] = kept
                memory = self.memory("constant", name, kept.numel() * kept.dtype.itemsize)
                self._equal_constants[key] = Stored(memory, contiguous(kept.shape, kept.dtype))
            self._stored_constants[id(tensor)] = self._equal_constants[key]
        return self._stored_constants[id(tensor)]

    # Groups

    def _is_row_of(self, node: Node, group: Group) -> bool:
        value = self.values.get(node)
        return isinstance(value, Pending) and value.rows and value.group is group

    def complete(self, memory: Memory) -> None:
        """Emits the groups that have yet to write to a buffer."""
        for group in [group for group in self._open if memory in group.written]:
            self.close(group)

    def close(self, group: Group) -> None:
        if group.closed:
            return
        self._open.remove(group)
        for value in group.pending:
            if value.home is None:
                self._keep_if_needed(group, value)
        step = group.close()
        if step is not None:
            self.emit(step)

    def _keep_if_needed(self, group: Group, value: Pending) -> None:
        """Stores what nodes that are still to come will read."""
        for node in value.nodes:
            if any(user in self.live and user not in self.values for user in node.users):
                self._give_home(value, self.fake(node))
                return

    def before_writing(self, memory: Memory) -> None:
        """Emits who has yet to read a buffer, or to write to it."""
        for group in [group for group in self._open if memory in group.read]:
            self.close(group)
        self.complete(memory)

    def close_all(self) -> None:
        for group in list(self._open):
            self.close(group)

    def group_of(self, shape: torch.Size, operands: list[Node], *, inner: int | None = None) -> tuple[Group, bool]:
        """A group that an operator joins, and whether it computes per row there.

        Operands that are pending in other groups are emitted.

        Args:
            shape: of the operator's result; of a reduction, of its operand.
            inner: how many of the last dimensions it reduces.
        """
        own = squeezed(shape)
        pending = [value for node in operands if isinstance(value := self.values.get(node), Pending)]
        groups = sorted({value.group for value in pending if not value.group.closed}, key=self._open.index)
        candidates = groups[::-1] + self._open[-1:]
        chosen, rows = None, False
        for group in candidates:
            if group.is_full or (inner is not None and not group.can_reduce(inner)):
                continue
            row_nodes = [node for node in operands if self._is_row_of(node, group)]
            if own == group.domain and all(group.takes_rows(self.fake(node).shape, shape) for node in row_nodes):
                chosen = group
                break
            if inner is None and group.inner and own == group.outer and row_nodes:
                chosen, rows = group, True
                break
        if chosen is None:
            chosen = Group(own)
            self._open.append(chosen)
        for group in groups:
            if group is not chosen:
                self.close(group)
        for node in operands:
            # What the group is to load must be written before the group begins.
            value = self.values.get(node)
            if isinstance(value, Stored):
                if value.memory in chosen.written:
                    self.close(chosen)
                    return self.group_of(shape, operands, inner=inner)
                self.complete(value.memory)
        return chosen, rows
