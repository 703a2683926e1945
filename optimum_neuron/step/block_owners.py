# SPDX-License-Identifier: Apache-2.0
"""The owners of cache blocks that decode rows attend in place. Imports no torch.

Each physical block that a graph reads is an entry: it attends with the query of the row that owns it. A block of several rows has
further entries, one for each row, and none in place. A row's partial results are joined in the order of its own blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class OwnerSizes:
    """The sizes of `BlockOwners`: R `rows` with up to `row_blocks` blocks, K `blocks`, the cache's first, and X `shared` at most."""

    rows: int
    row_blocks: int
    blocks: int
    block_length: int
    shared: int

    @property
    def nothing(self) -> int:
        return self.blocks + self.shared * self.rows

    @property
    def unseen(self) -> int:  # the first position of a block that no row sees: after all tokens
        return self.row_blocks * self.block_length

    def shapes(self) -> dict[str, tuple[int, ...]]:
        places = (self.blocks,), (self.blocks,), (self.shared,), (self.shared,), (self.rows, self.row_blocks)
        return {
            name: shape
            for name, shape in zip(BlockOwners._fields, places, strict=True)
            if self.shared or shape != (0,)
        }


class BlockOwners(NamedTuple):
    """Inputs of decode rows, all int32.

    Attributes:
        block_owner: `[K]`, the row that a block attends with; row 0 where it has no owner, or several.
        block_base: `[K]`, the position of its first token; `OwnerSizes.unseen` where it has no owner, or several.
        shared_blocks, shared_base: `[X]`, blocks with several owners, and their positions. Unused places name block 0, unseen.
        joined: `[R, row_blocks]`, the entry of each block of a row, in order: k for block k in place, `K + x * R + r` for row
            r in place x of the shared ones, and `OwnerSizes.nothing` after the row's last block.
    """

    block_owner: np.ndarray
    block_base: np.ndarray
    shared_blocks: np.ndarray
    shared_base: np.ndarray
    joined: np.ndarray


class TooManySharedBlocksError(ValueError):
    """More blocks with several owners than a graph has places for."""


def fill_owners(
    out: BlockOwners | Mapping[str, np.ndarray], sizes: OwnerSizes, tables: np.ndarray, counts: np.ndarray
) -> None:
    """Write the inputs of decode rows about the blocks that they read into arrays of `sizes.shapes()`.

    Args:
        tables: `[R, row_blocks]`, the physical block of each block of a row.
        counts: `[R]`, how many of them hold tokens that the row reads; 0 for an idle row.

    Raises:
        ValueError: a block is beyond those that the graph reads, or begins at different positions for two rows.
        TooManySharedBlocksError: see there; `rows_apart` finds rows that fit.
    """
    owner, base, shared_blocks, shared_base, joined = (
        out if isinstance(out, BlockOwners) else (out.get(name, np.empty(0, np.int32)) for name in BlockOwners._fields)
    )
    held = np.arange(sizes.row_blocks, dtype=np.int32) < counts[:, None]
    rows, columns = held.nonzero()
    blocks = tables[held]
    if blocks.size and int(blocks.max()) >= sizes.blocks:
        raise ValueError(
            f"block {int(blocks.max())} is beyond the {sizes.blocks} blocks that this graph reads; run a larger one"
        )
    uses = np.bincount(blocks, minlength=sizes.blocks)
    owner.fill(0)
    base.fill(sizes.unseen)
    owner[blocks] = rows
    base[blocks] = columns * sizes.block_length
    entries = blocks
    elsewhere = (base[blocks] != columns * sizes.block_length).nonzero()[0]
    if elsewhere.size:  # keys know their position
        block, column = int(blocks[elsewhere[0]]), int(columns[elsewhere[0]])
        raise ValueError(
            f"block {block} is at position {column * sizes.block_length} of one row and at {int(base[block])} of another; only "
            f"blocks at the same place can be shared"
        )
    found = (uses > 1).nonzero()[0]
    if found.size > sizes.shared:
        raise TooManySharedBlocksError(
            f"{found.size} blocks have several owners among these rows, and this graph has places for {sizes.shared}; decode "
            f"some of the rows in a step of their own"
        )
    if sizes.shared:
        shared_blocks.fill(0)
        shared_base.fill(sizes.unseen)
        shared_blocks[: found.size] = found
        shared_base[: found.size] = base[found]
    if found.size:
        owner[found], base[found] = 0, sizes.unseen
        first = np.arange(sizes.blocks)
        first[found] = sizes.blocks + np.arange(found.size) * sizes.rows
        entries = first[blocks] + np.where(uses[blocks] > 1, rows, 0)
    joined.fill(sizes.nothing)
    joined[held] = entries


def rows_apart(sizes: OwnerSizes, tables: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Split rows with blocks into ascending groups that each fit one step: a row joins the first with places for what it shares."""
    groups: list[tuple[list[int], np.ndarray]] = []
    for row in counts.nonzero()[0]:
        own = tables[row, : counts[row]]
        for rows, uses in groups:
            uses[own] += 1
            if np.count_nonzero(uses > 1) <= sizes.shared:
                rows.append(int(row))
                break
            uses[own] -= 1
        else:
            uses = np.zeros(sizes.blocks, np.int32)
            uses[own] += 1
            groups.append(([int(row)], uses))
    return [np.array(rows) for rows, _ in groups]
