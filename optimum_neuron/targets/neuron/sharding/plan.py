# SPDX-License-Identifier: Apache-2.0
"""The plan of a model's shards, as data: the cut of each tensor, and the modules that compute with parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor


RANK_BUFFER = "tensor_parallel_rank"
# The rank's own number, `[1]` int32: the one tensor that differs between ranks without being a shard.
RANK_TENSOR = f"model.{RANK_BUFFER}"
# In place of a block's or a head's number: zeros.
PADDING = -1


@dataclass(frozen=True)
class Section:
    """A stretch of one dimension that is cut by itself: a fused projection has one for queries, keys and values each."""

    start: int  # in the whole tensor
    size: int
    block: int  # elements that stay together, such as those of a head. Zeros fill up the last block of a section
    # The blocks of the ranks, or PADDING, one rank's after the other's. All ranks have as many; one may occur twice.
    order: tuple[int, ...]

    def local_size(self, world_size: int) -> int:
        return self.block * (len(self.order) // world_size)


@dataclass(frozen=True)
class ShardRule:
    """The sections of one dimension; a rank holds its part of each, side by side."""

    dim: int
    sections: tuple[Section, ...]

    def local_size(self, world_size: int) -> int:
        return sum(section.local_size(world_size) for section in self.sections)

    def places(self, rank: int, world_size: int) -> tuple[int, ...]:
        pieces = self._list_pieces(rank, world_size)
        return tuple(
            place
            for start, present, padding in pieces
            for place in (*range(start, start + present), *[PADDING] * padding)
        )

    def shard(self, tensor: Tensor, rank: int, world_size: int) -> Tensor:
        """Return one rank's part: a view where it lies in one piece, else a copy of its own size."""
        parts = []
        for start, present, padding in self._list_pieces(rank, world_size):
            if present:
                parts.append(tensor.narrow(self.dim, start, present))
            if padding:
                parts.append(tensor.new_zeros([*tensor.shape[: self.dim], padding, *tensor.shape[self.dim + 1 :]]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def _list_pieces(self, rank: int, world_size: int) -> Iterator[tuple[int, int, int]]:
        """Yield the begin of each block in the whole tensor, its elements there, and the zeros that follow."""
        for section in self.sections:
            count = len(section.order) // world_size
            for block in section.order[rank * count : (rank + 1) * count]:
                offset = block * section.block
                present = 0 if block == PADDING else max(0, min(section.block, section.size - offset))
                yield section.start + offset, present, section.block - present


def even(size: int, world_size: int, *, start: int = 0, unit: int = 1) -> Section:
    """Return consecutive parts of one size, in whole `unit`s; where they do not divide, zeros fill up the last ones."""
    return Section(start, size, -(-size // (unit * world_size)) * unit, tuple(range(world_size)))


def packed(size: int, parts: int, world_size: int) -> tuple[Section, ...]:
    """Cut equal projections one after the other in one dimension, such as gate and up, each evenly."""
    part = size // parts
    return tuple(even(part, world_size, start=start) for start in range(0, size, part))


def by_heads(size: int, heads: int, order: tuple[int, ...], *, start: int = 0) -> Section:
    """Return whole heads of equal size, in an order of `HeadLayout`."""
    return Section(start, size, size // heads, order)


@dataclass(frozen=True)
class HeadLayout:
    """Query and key/value heads by slot: every rank has as many slots as every other.

    Attention code gives consecutive query heads to one key/value head, so all key/value slots have as many query slots. A slot may hold
    padding, a head of zeros that o_proj's zero columns ignore; a key/value head may be in several slots.
    """

    # In the whole model.
    heads: int
    kv_heads: int
    # The head in each slot, or PADDING; one rank's slots after the other's.
    query: tuple[int, ...]
    key_value: tuple[int, ...]
    world_size: int

    @property
    def local_query(self) -> int:
        return len(self.query) // self.world_size

    @property
    def local_key_value(self) -> int:
        return len(self.key_value) // self.world_size


def head_layout(heads: int, kv_heads: int, world_size: int) -> HeadLayout:
    """Give every query head one slot with its key/value head; raise ValueError where `heads` is no multiple of `kv_heads`.

    A rank gets the fewest key/value slots that hold all of them, since the KV cache grows with them and decoding reads it all; then the
    fewest query slots. So 8 key/value heads on 4 ranks are 2 each, on 16 ranks each is held by two, and query heads that do not divide
    leave padding at the end of their group.
    """
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key/value heads")
    group = heads // kv_heads
    slots = world_size * -(-kv_heads // world_size)
    query_slots = -(-group // (slots // kv_heads))  # per key/value slot
    copies = -(-group // query_slots)
    query, key_value = list[int](), list[int]()
    for kv_head in range(kv_heads):
        first, end = kv_head * group, (kv_head + 1) * group
        key_value += [kv_head] * copies
        query += [head if head < end else PADDING for head in range(first, first + copies * query_slots)]
    key_value += [PADDING] * (slots - len(key_value))
    query += [PADDING] * (slots * query_slots - len(query))
    return HeadLayout(heads, kv_heads, tuple(query), tuple(key_value), world_size)


@dataclass(frozen=True)
class ShardedRecurrence:
    """A layer's recurrence. Each rank has as many consecutive heads as any other, and the key heads that these use."""

    world_size: int
    heads: int  # in the whole model, as key heads
    key_heads: int
    # Heads, and numbers of each, of a token's key and of the rest that changes the state (`ScanCall.inputs`).
    inputs: tuple[tuple[int, int], ...]
    # Attributes by which the layer's code computes a rank's heads: the part of the layer, the name, a rank's value.
    sizes: tuple[tuple[str, str, int], ...] = ()
    # Its convolutions' parameters `[channels, 1, kernel]`, by their names in the layer, in the order of their states.
    filters: tuple[str, ...] = ()

    def heads_of(self, rank: int) -> list[int]:
        count = self.heads // self.world_size
        return list(range(rank * count, (rank + 1) * count))

    def key_heads_of(self, rank: int) -> list[int]:
        group = self.heads // self.key_heads
        return sorted({head // group for head in self.heads_of(rank)})

    def inputs_of(self, rank: int) -> list[int]:
        places, first = list[int](), 0
        for number, (heads, size) in enumerate(self.inputs):
            for head in self.heads_of(rank) if number else self.key_heads_of(rank):
                places += range(first + head * size, first + (head + 1) * size)
            first += heads * size
        return places


@dataclass
class ShardPlan:
    """The way in which `world_size` ranks share a model.

    Tensors have the names that `weights.named_tensors` gives them, modules those of the model.
    """

    model_type: str
    world_size: int
    vocab_size: int  # logits of the whole model
    shapes: dict[str, tuple[int, ...]]  # of all tensors of the whole model
    rules: dict[str, ShardRule] = field(default_factory=dict)  # tensors that are cut; a rank holds all others whole
    row_linears: list[str] = field(default_factory=list)  # linear layers with partial sums as outputs
    reduced: list[str] = field(default_factory=list)  # other modules with partial sums as outputs
    # Modules that need their whole input, such as a norm over all heads; and the cut of its last dimension.
    whole_inputs: dict[str, Section] = field(default_factory=dict)
    attention: dict[str, HeadLayout] = field(default_factory=dict)  # attention layers of which a rank has some heads
    # Modules that keep inputs of a convolution; each rank has as many consecutive channels as any other.
    convolutions: list[str] = field(default_factory=list)
    # Layers with a recurrence of which a rank has some heads; others are whole on every rank.
    recurrences: dict[str, ShardedRecurrence] = field(default_factory=dict)
    embedding: str = ""  # the input embedding, of which a rank has some rows

    @property
    def local_vocab_size(self) -> int:
        """Return the logits of one rank; the last rank's may be more than the vocabulary has."""
        return -(-self.vocab_size // self.world_size)

    @property
    def whole(self) -> set[str]:
        return self.shapes.keys() - self.rules.keys()

    def cut_tensor(self, name: str, dim: int, *sections: Section) -> None:
        """Add the rule of a tensor, named as in the model; a negative `dim` counts from the end."""
        tensor = f"model.{name}"
        self.rules[tensor] = ShardRule(dim % len(self.shapes[tensor]), sections)

    def local_shape(self, name: str) -> tuple[int, ...]:
        shape = list(self.shapes[name])
        if name in self.rules:
            shape[self.rules[name].dim] = self.rules[name].local_size(self.world_size)
        return tuple(shape)

    def channels(self, layer: str, index: int, rank: int) -> tuple[int, ...] | None:
        """Return the channels of a recurrent layer's convolution that a rank has; None for all."""
        rule = self.rules.get(f"model.{layer}.{self.recurrences[layer].filters[index]}")
        return None if rule is None else rule.places(rank, self.world_size)

    def shard(self, tensor: Tensor, name: str, rank: int) -> Tensor:
        """Return a rank's part of a whole tensor: a view of it, or a copy of the part's size."""
        return self.rules[name].shard(tensor, rank, self.world_size) if name in self.rules else tensor

    def make_refusal(self, reason: object) -> ValueError:
        whole = f"{self.model_type} cannot be shared by tensor_parallel_size={self.world_size} ranks"
        return ValueError(f"{whole}: {reason}; use tensor_parallel_size=1")
