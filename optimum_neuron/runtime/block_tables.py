# SPDX-License-Identifier: Apache-2.0
"""The blocks of the cache that each row has. The engine's scheduler, vLLM's, or `reserve_rows` decides about them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..config import NeuronConfig
from .lengths import count_blocks


class BlockTables:
    """The blocks of all rows, in the order of their tokens.

    Attributes:
        blocks: `[batch_size, blocks_per_row]` int32; after a row's last block, the first block of trash.
        counts: `[batch_size]` int32, blocks that each row has.
    """

    def __init__(self, config: NeuronConfig) -> None:
        self._config = config
        self.block_length = config.block_length
        self.blocks = np.full((config.batch_size, config.blocks_per_row), config.kv_blocks, dtype=np.int32)
        self.counts = np.zeros(config.batch_size, dtype=np.int32)

    @property
    def capacity(self) -> np.ndarray:
        """`[batch_size]`, tokens that each row has room for."""
        return self.counts * self.block_length

    def read_blocks(self, active: np.ndarray | bool, lengths: np.ndarray) -> np.ndarray:
        """Return `[batch_size]`, the blocks that active rows read: those with a token before the step."""
        return np.where(active, -(-lengths // self.block_length), 0)

    def last_block(self, active: np.ndarray, lengths: np.ndarray) -> int:
        """Return the highest block that active rows read; -1 where they read none."""
        held = np.arange(self.blocks.shape[1]) < self.read_blocks(active, lengths)[:, None]
        return int(self.blocks.max(initial=-1, where=held))

    def assign_blocks(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """Give a row blocks from its block `first` on, in place of those there; raise ValueError for any that cannot be."""
        most, end = self._config.kv_blocks, first + len(blocks)
        if not all(0 <= block < most for block in blocks):
            raise ValueError(f"row {row} is given the blocks {list(blocks)}, and there are {most}, from 0 on")
        if not 0 <= first <= self.counts[row] or end > self._config.blocks_per_row:
            raise ValueError(
                f"row {row} has {self.counts[row]} of at most {self._config.blocks_per_row} blocks: {len(blocks)} cannot "
                f"follow block {first}"
            )
        self.blocks[row, first:end] = blocks
        self.blocks[row, end:] = most
        self.counts[row] = end

    def clear_row(self, row: int) -> None:
        """Take all blocks from a row."""
        self.assign_blocks(row, 0, ())

    def clear_rows(self) -> None:
        """Take all blocks from all rows."""
        self.blocks.fill(self._config.kv_blocks)
        self.counts.fill(0)

    def reserve_rows(self, tokens: Sequence[int]) -> None:
        """Give the first rows room for so many tokens each, in blocks that follow one another, and the others none.

        Raises ValueError if there are not so many blocks. No row is changed then.
        """
        needed = count_blocks(tokens, self._config)
        self.clear_rows()
        start = 0
        for row, count in enumerate(needed):
            self.assign_blocks(row, 0, range(start, start + count))
            start += count
