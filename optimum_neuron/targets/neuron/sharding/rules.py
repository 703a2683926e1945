# SPDX-License-Identifier: Apache-2.0
"""How one tensor is cut into the parts of the ranks, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .heads import PADDING


@dataclass(frozen=True)
class Section:
    """A stretch of one dimension that is cut by itself: a fused projection has one for queries, keys and values each.

    Attributes:
        start, size: where the stretch lies in the whole tensor.
        block: elements that stay together, such as those of a head. The last block of a section may have fewer: zeros
            fill it up.
        order: the blocks that the ranks hold, one rank's after the other's, all ranks having as many. A block may
            occur more than once; PADDING is a block of zeros.
    """

    start: int
    size: int
    block: int
    order: tuple[int, ...]

    def blocks(self, rank: int, world_size: int) -> tuple[int, ...]:
        """The blocks of one rank."""
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
        """Where in the whole tensor each element of a rank's part is, or PADDING."""
        places = list[int]()
        for section in self.sections:
            for block in section.blocks(rank, world_size):
                inside = range(block * section.block, (block + 1) * section.block)
                places += [
                    section.start + each if block != PADDING and each < section.size else PADDING for each in inside
                ]
        return tuple(places)

    def shard(self, tensor: Tensor, rank: int, world_size: int) -> Tensor:
        """One rank's part: a view where it lies in one piece, else a copy of its own size."""
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
    """Consecutive parts of one size, in whole `unit`s; where they do not divide, zeros fill up the last ones."""
    return Section(start, size, -(-size // (unit * world_size)) * unit, tuple(range(world_size)))


def packed(size: int, parts: int, world_size: int) -> tuple[Section, ...]:
    """Equal projections one after the other in one dimension, such as gate and up, each cut evenly."""
    part = size // parts
    return tuple(even(part, world_size, start=start) for start in range(0, size, part))


def by_heads(size: int, heads: int, order: tuple[int, ...], *, start: int = 0) -> Section:
    """Whole heads of equal size, in an order of `heads.HeadLayout`."""
    return Section(start, size, size // heads, order)


def first_rank_only(size: int, world_size: int) -> Section:
    """Whole on rank 0 and zeros elsewhere: what a later sum over the ranks has to count once."""
    return Section(0, size, size, (0, *[PADDING] * (world_size - 1)))
