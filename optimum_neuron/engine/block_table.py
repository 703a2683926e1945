# SPDX-License-Identifier: Apache-2.0
"""Rows of a cache of blocks: who holds each, and which blocks it has. The counterpart of `SlotTable`."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..config import NeuronConfig
from .block_draft import BlockDraft
from .block_pool import BlockPool
from .request import RequestState
from .slots import MIN_REUSE
from .snapshots import SnapshotTable
from .step import Assignment, KeptState, PrefixReuse, ScheduledChunk, Step


class BlockTable:
    """The rows of a cache of blocks.

    Args:
        min_reuse: tokens that a part of a block must have to be copied.
        snapshots: of state that rows keep beside blocks; None where they keep none.
    """

    def __init__(
        self, config: NeuronConfig, min_reuse: int = MIN_REUSE, snapshots: SnapshotTable | None = None
    ) -> None:
        self.snapshots = snapshots
        self.pool = BlockPool(config.kv_blocks, config.block_length, min_reuse)
        self.free_slots = list(range(config.batch_size))
        self._blocks: list[list[int]] = [[] for _ in self.free_slots]
        self._known = [0] * config.batch_size  # tokens of each row that its blocks' contents have
        self._holders: list[str | None] = [None] * config.batch_size
        self._size = config.kv_blocks

    @property
    def free_count(self) -> int:
        """Rows that no request holds."""
        return len(self.free_slots)

    @property
    def used(self) -> int:
        """Blocks that requests have."""
        return self._size - self.pool.free_count

    def blocks(self, slot: int) -> Sequence[int]:
        """The blocks of a row, in order."""
        return self._blocks[slot]

    def reach(self, rows: Iterable[tuple[int, int]]) -> int:
        """The highest block that rows read, and one: of each row and the tokens that it has."""
        size = self.pool.block_length
        return max((max(self._blocks[row][: -(-tokens // size)], default=-1) for row, tokens in rows), default=-1) + 1

    def draft(self, holders: Iterable[RequestState]) -> BlockDraft:
        """What the next step may give out.

        Args:
            holders: all requests that have a row.
        """
        return BlockDraft(self.pool, self._blocks, self.free_slots, holders, self.snapshots)

    def hold(self, slot: int, request_id: str, reuse: PrefixReuse | None = None) -> None:
        """Gives a free row to a request.

        Raises:
            RuntimeError: another request holds it.
        """
        if self._holders[slot] is not None:
            raise RuntimeError(f"row {slot} is held by request {self._holders[slot]!r}, not free for {request_id!r}")
        self._holders[slot] = request_id
        self.free_slots.remove(slot)

    def release(self, slot: int) -> None:
        """Takes a row and its blocks back; what they contain is kept.

        Raises:
            RuntimeError: no request holds the row.
        """
        if self._holders[slot] is None:
            raise RuntimeError(f"row {slot} is free and cannot be released")
        self._holders[slot] = None
        insort(self.free_slots, slot)
        self.pool.release(self._blocks[slot])
        self._blocks[slot], self._known[slot] = [], 0

    def change(self, step: Step, live: Callable[[Assignment | KeptState], RequestState | None]) -> None:
        """Makes blocks the rows' that a step assigned them to, and follows what it kept.

        Args:
            live: the request of an assignment; None where it was aborted since, and the step wrote to the blocks for nobody.
        """
        if self.snapshots is not None:
            self.snapshots.change(step, live)
        for copy in step.copies:
            self.pool.touch(copy.source)
        for assignment in step.assignments:
            blocks, shared = assignment.blocks, assignment.shared
            if live(assignment):
                self.pool.acquire(blocks[:shared], fresh=False)
                self.pool.acquire(blocks[shared:], fresh=True)
                self._blocks[assignment.slot] += blocks
                self._known[assignment.slot] += shared * self.pool.block_length
            else:
                for block in blocks[shared:]:
                    self.pool.forget(block)

    def write(self, slot: int, start: int, tokens: np.ndarray | Sequence[int]) -> None:
        """Adds to what a row's blocks contain the tokens from place `start` on, as far as they are not known yet."""
        known = self._known[slot]
        if start <= known:
            self.pool.write(self._blocks[slot], known, tokens[known - start :])
            self._known[slot] = start + len(tokens)

    def append(self, slot: int, token_id: int) -> None:
        """Adds one token behind what is known of a row."""
        self.write(slot, self._known[slot], (token_id,))

    def overwritten(self, chunk: ScheduledChunk) -> None:
        """Notes that a row got tokens that nobody may reuse: its own blocks were void when they were assigned."""

    def clear(self) -> None:
        """Forgets all contents, and those to come of rows that are held, and all snapshots."""
        self.pool.clear()
        if self.snapshots is not None:
            self.snapshots.clear()
        self._known = [0 if holder is None else -1 for holder in self._holders]
