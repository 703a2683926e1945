# SPDX-License-Identifier: Apache-2.0
"""Rows of a cache: which request holds each, and which blocks it has. A slot is a row that is one block, of the same number."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..config import NeuronConfig
from ..core import Assignment, KeptState, Step
from .block_draft import BlockDraft
from .block_pool import MIN_REUSE, BlockPool
from .request import RequestState
from .snapshots import SnapshotTable


class BlockTable:
    """The rows of a cache and the blocks of each.

    Args:
        min_reuse: tokens that a part of a block must have to be copied.
        snapshots: of state that rows keep next to blocks; None where they keep none.
    """

    def __init__(
        self, config: NeuronConfig, min_reuse: int = MIN_REUSE, snapshots: SnapshotTable | None = None
    ) -> None:
        self.snapshots = snapshots
        self.pool = BlockPool(config.kv_blocks, config.block_length, min_reuse)
        self.free_rows = list(range(config.batch_size))
        self._has_slots = config.kv_block_size is None
        self._blocks: list[list[int]] = [[] for _ in self.free_rows]
        self._known = [
            0
        ] * config.batch_size  # tokens of each row that its blocks' contents have; below 0: none, and none to come
        self._holders: list[str | None] = [None] * config.batch_size
        self._size = config.kv_blocks

    @property
    def free_count(self) -> int:
        """Rows that no request holds."""
        return len(self.free_rows)

    @property
    def used_blocks(self) -> int:
        """Blocks that requests have."""
        return self._size - self.pool.free_count

    def row_blocks(self, row: int) -> Sequence[int]:
        """Return the blocks of a row, in order."""
        return self._blocks[row]

    def count_known(self, row: int) -> int:
        """Return how many of a row's tokens its blocks' contents have; below 0 where contents were forgotten while it was held."""
        return self._known[row]

    def highest_block(self, rows: Iterable[tuple[int, int]]) -> int:
        """Return the highest block that rows read, and one more.

        Args:
            rows: each row and the tokens that it has.
        """
        size = self.pool.block_length
        return max((max(self._blocks[row][: -(-tokens // size)], default=-1) for row, tokens in rows), default=-1) + 1

    def draft_step(self, holders: Iterable[RequestState] = (), most_starts: int | None = None) -> BlockDraft:
        """Return what the next step may give out.

        Args:
            holders: all requests that have a row.
            most_starts: requests that may start, where these are fewer than free rows.
        """
        starts = self.free_count if most_starts is None else min(most_starts, self.free_count)
        free_rows = self.free_rows[:starts]
        if self._has_slots:
            return BlockDraft(self.pool, self._blocks, free_rows, (), self.snapshots, rows_are_blocks=True)
        return BlockDraft(self.pool, self._blocks, free_rows, holders, self.snapshots)

    def hold_row(self, row: int, request_id: str) -> None:
        """Give a free row to a request.

        Raises:
            RuntimeError: another request holds it.
        """
        if self._holders[row] is not None:
            raise RuntimeError(f"row {row} is held by request {self._holders[row]!r}, not free for {request_id!r}")
        self._holders[row] = request_id
        self.free_rows.remove(row)

    def release_row(self, row: int) -> None:
        """Take back a row and its blocks; what they contain is kept.

        Raises:
            RuntimeError: no request holds the row.
        """
        if self._holders[row] is None:
            raise RuntimeError(f"row {row} is free and cannot be released")
        self._holders[row] = None
        insort(self.free_rows, row)
        self.pool.release_blocks(self._blocks[row])
        self._blocks[row], self._known[row] = [], 0

    def apply_step(self, step: Step, live: Callable[[Assignment | KeptState], RequestState | None]) -> None:
        """Follow what a step did to blocks and snapshots.

        Args:
            live: returns the request of an assignment; None where it was aborted since, so that its new blocks are void.
        """
        if self.snapshots is not None:
            self.snapshots.apply_step(step, live)
        for copy in step.copies:
            self.pool.touch_block(copy.source)
        for each in step.assignments:
            if live(each):
                self.give_blocks(each.slot, each.blocks, each.shared)
            else:
                for block in each.blocks[each.shared :]:
                    self.pool.forget_block(block)

    def give_blocks(self, row: int, blocks: Sequence[int], shared: int = 0) -> None:
        """Give a row more blocks, the first `shared` of which contain its tokens already."""
        self.pool.acquire_blocks(blocks[:shared], fresh=False)
        self.pool.acquire_blocks(blocks[shared:], fresh=True)
        self._blocks[row] += blocks
        self._known[row] += shared * self.pool.block_length

    def write_tokens(self, row: int, start: int, tokens: np.ndarray | Sequence[int]) -> None:
        """Add to what a row's blocks contain the tokens from place `start` on, as far as they are not known yet."""
        known = self._known[row]
        if start <= known:
            self.pool.write_tokens(self._blocks[row], known, tokens[known - start :])
            self._known[row] = start + len(tokens)

    def append_token(self, row: int, token_id: int) -> None:
        """Add one token to what is known of a row."""
        known = self._known[row]
        if known >= 0:
            self.pool.append_token(self._blocks[row], known, token_id)
            self._known[row] = known + 1

    def void_row(self, row: int) -> None:
        """Void the contents of a row that shares none of its blocks; it is written again from its start."""
        for block in self._blocks[row]:
            self.pool.void_block(block)
        self._known[row] = 0

    def forget_all(self) -> None:
        """Forget all contents and snapshots, and the contents to come of rows that are held."""
        self.pool.forget_all()
        if self.snapshots is not None:
            self.snapshots.forget_all()
        self._known = [0 if holder is None else -1 for holder in self._holders]
