# SPDX-License-Identifier: Apache-2.0
"""The cut of one tensor into the parts of the ranks, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Section:
    """A stretch of one dimension that is cut by itself: a fused projection has one for queries, keys and values each.

    Attributes:
        start, size: the place of the stretch in the whole tensor.
        block: elements that stay together, such as those of a head. Zeros fill up the last block of a section.
        order: the blocks of the ranks, one rank's after the other's, all ranks having as many. A block may occur more than once;
            PADDING is a block of zeros.
    """

    start: int
    size: int
    block: int
    order: tuple[int, ...]

    def blocks(self, rank: int, world_size: int) -> tuple[int, ...]:
        """Return the blocks of one rank."""
        count = len(self.order) // world_size
        return self.order[rank * count : (rank + 1) * count]

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
        """Return the place of each element of a rank's part in the whole tensor, or PADDING."""
        places = list[int]()
        for section in self.sections:
            for block in section.blocks(rank, world_size):
                inside = range(block * section.block, (block + 1) * section.block)
                places += [
                    section.start + each if block != PADDING and each < section.size else PADDING for each in inside
                ]
        return tuple(places)

    def shard(self, tensor: Tensor, rank: int, world_size: int) -> Tensor:
        """Return one rank's part: a view where it lies in one piece, else a copy of its own size."""
        parts = [
            part
            for section in self.sections
            for block in section.blocks(rank, world_size)
            for part in self._block(tensor, section, block)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def _block(self, tensor: Tensor, section: Section, block: int) -> list[Tensor]:
        offset = block * section.block
        present = 0 if block == PADDING else max(0, min(section.block, section.size - offset))
        parts = []
        if present:
            parts.append(tensor.narrow(self.dim, section.start + offset, present))
        if present < section.block:
            shape = list(tensor.shape)
            shape[self.dim] = section.block - present
            parts.append(tensor.new_zeros(shape))
        return parts


def even(size: int, world_size: int, *, start: int = 0, unit: int = 1) -> Section:
    """Return consecutive parts of one size, in whole `unit`s; where they do not divide, zeros fill up the last ones."""
    return Section(start, size, -(-size // (unit * world_size)) * unit, tuple(range(world_size)))


def packed(size: int, parts: int, world_size: int) -> tuple[Section, ...]:
    """Cut equal projections one after the other in one dimension, such as gate and up, each evenly."""
    part = size // parts
    return tuple(even(part, world_size, start=start) for start in range(0, size, part))


def by_heads(size: int, heads: int, order: tuple[int, ...], *, start: int = 0) -> Section:
    """Return whole heads of equal size, in an order of `heads.HeadLayout`."""
    return Section(start, size, size // heads, order)


def first_rank_only(size: int, world_size: int) -> Section:
    """Return a section that is whole on rank 0 and zeros elsewhere: a later sum over the ranks counts it once."""
    return Section(0, size, size, (0, *[PADDING] * (world_size - 1)))


# Instead of a head's number: a head of zeros.
PADDING = -1


@dataclass(frozen=True)
class HeadLayout:
    """Query and key/value heads by slot: every rank has as many slots as every other.

    Attention code gives consecutive query heads to one key/value head, so all key/value slots have as many query slots. A slot may hold
    padding, a head of zeros that o_proj's zero columns ignore; a key/value head may be in several slots.

    Attributes:
        query, key_value: the head in each slot, or PADDING; one rank's slots after the other's.
    """

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
    query: list[int] = []
    key_value: list[int] = []
    for kv_head in range(kv_heads):
        first, end = kv_head * group, (kv_head + 1) * group
        key_value += [kv_head] * copies
        query += [head if head < end else PADDING for head in range(first, first + copies * query_slots)]
    key_value += [PADDING] * (slots - len(key_value))
    query += [PADDING] * (slots * query_slots - len(query))
    return HeadLayout(tuple(query), tuple(key_value), world_size)
