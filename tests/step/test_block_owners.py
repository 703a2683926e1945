# SPDX-License-Identifier: Apache-2.0
"""Who owns which block: the fast function against what its words say, row by row."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuron.step.block_owners import BlockOwners, OwnerSizes, TooManySharedBlocksError, fill_owners, rows_apart


def described(sizes: OwnerSizes, tables: np.ndarray, counts: np.ndarray) -> BlockOwners:
    unseen = sizes.row_blocks * sizes.block_length
    owner, base = [0] * sizes.blocks, [unseen] * sizes.blocks
    joined = [[sizes.blocks + sizes.shared * sizes.rows] * sizes.row_blocks for _ in range(sizes.rows)]
    shared: list[tuple[int, int]] = []
    for block in range(sizes.blocks):
        places = [(row, j) for row in range(sizes.rows) for j in range(counts[row]) if tables[row, j] == block]
        if len(places) == 1:
            ((row, j),) = places
            owner[block], base[block], joined[row][j] = row, j * sizes.block_length, block
        elif places:
            for row, j in places:
                joined[row][j] = sizes.blocks + len(shared) * sizes.rows + row
            shared.append((block, places[0][1] * sizes.block_length))
    shared += [(0, unseen)] * (sizes.shared - len(shared))
    fields = owner, base, [block for block, _ in shared], [first for _, first in shared], joined
    return BlockOwners(*(np.array(each, np.int32) for each in fields))


def allocation(sizes: OwnerSizes, generator: np.random.Generator, most_shared: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tables, whose first blocks some rows have in common, and how many of each row's blocks hold tokens."""
    tables = generator.integers(0, sizes.blocks + 5, (sizes.rows, sizes.row_blocks), dtype=np.int32)
    counts = np.zeros(sizes.rows, np.int32)
    free = list(generator.permutation(sizes.blocks))
    row = 0
    while row < sizes.rows and free:
        together = int(min(generator.integers(1, 4), sizes.rows - row))
        prefix = int(min(generator.integers(0, sizes.row_blocks + 1), len(free), most_shared)) if together > 1 else 0
        most_shared -= prefix
        blocks = [free.pop() for _ in range(prefix)]
        for member in range(row, row + together):
            own = int(min(generator.integers(0, sizes.row_blocks - prefix + 1), len(free)))
            mine = blocks + [free.pop() for _ in range(own)]
            tables[member, : len(mine)] = mine
            counts[member] = len(mine)
        row += together
    return tables, counts


def filled(sizes: OwnerSizes, tables: np.ndarray, counts: np.ndarray) -> BlockOwners:
    arrays = {name: np.full(shape, 99, np.int32) for name, shape in sizes.shapes().items()}
    fill_owners(arrays, sizes, tables, counts)
    return BlockOwners(*(arrays.get(name, np.empty(0, np.int32)) for name in BlockOwners._fields))


@examples(200)
@given(
    st.integers(1, 6), st.integers(1, 4), st.integers(1, 12), st.integers(0, 4), st.booleans(), st.integers(0, 2**16)
)
def test_owners_are_what_the_tables_say(
    rows: int, row_blocks: int, blocks: int, shared: int, fits: bool, seed: int
) -> None:
    sizes = OwnerSizes(rows, row_blocks, blocks, 64, shared)
    tables, counts = allocation(sizes, np.random.default_rng(seed), shared if fits else 100)
    held = [tables[row, j] for row in range(rows) for j in range(counts[row])]
    several = sum(held.count(block) > 1 for block in set(held))
    if several > shared:
        with pytest.raises(
            TooManySharedBlocksError, match=f"^{several} blocks have several owners .* places for {shared}"
        ):
            filled(sizes, tables, counts)
    else:
        for found, expected in zip(filled(sizes, tables, counts), described(sizes, tables, counts), strict=True):
            assert found.dtype == np.int32 and np.array_equal(found, expected)
    groups = rows_apart(sizes, tables, counts)
    assert sorted(row for group in groups for row in group) == list(counts.nonzero()[0])
    assert len(groups) == bool(held) if several <= shared else len(groups) > 1
    for group in groups:
        alone = np.where(np.isin(np.arange(rows), group), counts, 0)
        filled(sizes, tables, alone)


def test_a_block_beyond_those_of_the_graph_and_one_at_two_places_are_refused() -> None:
    sizes = OwnerSizes(2, 2, 4, 64, 2)
    with pytest.raises(ValueError, match=r"^block 4 is beyond the 4 blocks that this graph reads"):
        filled(sizes, np.array([[0, 4], [1, 2]], np.int32), np.array([2, 2]))
    filled(sizes, np.array([[0, 4], [1, 2]], np.int32), np.array([1, 2]))
    with pytest.raises(ValueError, match=r"^block 1 is at position 64 of one row and at 0 of another"):
        filled(sizes, np.array([[0, 1], [1, 2]], np.int32), np.array([2, 2]))
