# SPDX-License-Identifier: Apache-2.0
"""What holds of the engine's tables of a cache at all times. Each function fails where a table contradicts itself."""

from __future__ import annotations

import numpy as np

from optimum_neuron.engine.block_pool import BlockPool
from optimum_neuron.engine.block_table import BlockTable
from optimum_neuron.engine.snapshots import SnapshotTable, StatePool


def held_tokens(table: BlockTable, block: int) -> list[int]:
    """The tokens of a block that other rows may use."""
    return table.pool._tokens[block, : table.pool._lengths[block]].tolist()


def check_cache(table: BlockTable) -> None:
    """Check a table, its blocks and its snapshots."""
    if isinstance(table.pool, StatePool):
        check_snapshots(table.pool.snapshots)
    check_pool(table.pool)
    _check_rows(table)


def check_pool(pool: BlockPool) -> None:
    """Check which blocks are free, and by which tokens they are found."""
    free = sorted([*pool._empty, *pool._kept])
    unused = [block for block, count in enumerate(pool._references) if not count]
    assert free == unused and min(pool._references) >= 0, f"free {free}, without references {unused}"
    assert pool._empty == sorted(pool._empty)
    assert all(pool._lengths[block] for block in pool._kept) and not any(pool._lengths[pool._empty])
    assert ((pool._lengths >= 0) & (pool._lengths <= pool.block_length)).all()
    begun = [block for blocks in pool._beginning.values() for block in blocks]
    assert sorted(begun) == np.flatnonzero(pool._lengths >= pool._min_reuse).tolist()
    for key, block in pool._full.items():
        assert key == pool._full_key(block) and pool._lengths[block] == pool.block_length and pool._after[block]


def check_snapshots(table: SnapshotTable) -> None:
    """Check the order in which places are given away, and that no two snapshots are alike."""
    assert sorted([*table._unused, *table._used]) == list(range(len(table._tokens)))
    full = [table._tokens[place] is not None for place in (*table._unused, *table._used)]
    assert full == sorted(full), "an empty place is given away after a full one"
    assert len(table._used) <= len(table._tokens) // 2
    texts = [tokens.tobytes() for tokens in table._tokens if tokens is not None]
    assert len(set(texts)) == len(texts), "two snapshots are of the same tokens"


def _check_rows(table: BlockTable) -> None:
    free = [slot for slot, holder in enumerate(table._holders) if holder is None]
    assert table.free_rows == free, f"free rows {table.free_rows} beside {table._holders}"
    assert not any(table.blocks[slot] for slot in free), "a free row has blocks"
    counted = np.bincount([block for row in table.blocks for block in row], minlength=table._size)
    references = [table.pool.count_rows(block) for block in range(table._size)]
    assert counted.tolist() == references, f"rows have {counted.tolist()}, counted are {references}"
    for slot, row in enumerate(table.blocks):
        assert not table.has_slots or row in ([], [slot]), f"slot {slot} has blocks {row}"
        own = table.known[slot] // table.pool.block_length  # blocks from here on are written to
        assert len(set(row)) == len(row) and all(references[block] == 1 for block in row[max(own, 0) :])
