# SPDX-License-Identifier: Apache-2.0
"""The use of a cache by one step: who gives blocks back, who may start, and which blocks rows get. Changes nothing.

Of the requests that have a row, all can advance by a token at least once the last ones, by priority and then by arrival, have
given their blocks back: each has a claim to the block that its next token needs. So the first always advances.

A request starts only where blocks remain for all its tokens and one more, next to those that the others still need for theirs
and one more each. All of them decode for `block_length` steps with no more than that, so none is preempted that soon after
a start: blocks do not go back and forth, and what is computed twice is bounded.

Where rows are blocks, each holds the longest request: a request that has one needs nothing more, and none is preempted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter

import numpy as np

from ..core import Assignment, BlockCopy, Prefix, RequestRow, Step
from .block_pool import BlockPool
from .request import RequestState
from .snapshots import SnapshotTable


NO_PREFIX = Prefix()


class BlockDraft:
    """A step's use of blocks so far.

    Args:
        rows: the blocks of each row.
        free_rows: ascending.
        holders: all requests that have a row and may need more blocks.
        snapshots: of state that rows keep next to blocks; None where they keep none.
        rows_are_blocks: row i has block i and no other.

    Attributes:
        preempted: requests that give back what they have, the last by priority and arrival first.
        assignments, copies: as in `Step`.
    """

    def __init__(
        self,
        pool: BlockPool,
        rows: Sequence[Sequence[int]],
        free_rows: Sequence[int],
        holders: Iterable[RequestState],
        snapshots: SnapshotTable | None = None,
        *,
        rows_are_blocks: bool = False,
    ) -> None:
        self._pool = pool
        self._snapshots = snapshots
        self._size = pool.block_length
        self._rows = rows
        self._free_rows = free_rows
        self._rows_are_blocks = rows_are_blocks
        self._holders = list(holders)
        self._available = pool.free_count
        self._claims = {state.arrival for state in self._holders if self._needs_block(state)}
        self.preempted: list[RequestRow] = []
        self.assignments: list[Assignment] = []
        self.copies: list[BlockCopy] = []
        released = self._preempt_last() if len(self._claims) > self._available else ()
        self._candidates: Iterator[int] = chain(pool.list_free(), released)
        self._given: set[int] = set()
        self._revived: set[int] = set()
        self._starts = 0
        self._unpromised: int | None = None
        self._closed = bool(self.preempted)

    @property
    def open_rows(self) -> int:
        """Rows that requests may still start in; none where a request was preempted, or has to wait for blocks."""
        return 0 if self._closed else len(self._free_rows) - self._starts

    def place_prompt(
        self, tokens: np.ndarray, reuse: bool, state: RequestState | None = None
    ) -> tuple[int, Prefix] | None:
        """Return the row of a request that starts, and what the cache holds of its tokens; None where blocks are too few.

        Args:
            tokens: int32 `[n]`, all that it takes in before it generates.
            reuse: whether to look for a prefix at all.
            state: the request; without need where rows are blocks.
        """
        prefix = self._find_prefix(tokens) if reuse else NO_PREFIX
        if self._rows_are_blocks:
            return self._pick_blocks(prefix, 1, self._pool.list_free())[0], prefix
        assert state is not None
        if self._count_needed(state, len(prefix.blocks)) + self._count_revived(prefix) > self._count_unpromised():
            return None
        return self._free_rows[self._starts], prefix

    def may_share(self, state: RequestState, length: int) -> bool:
        """Return False where the cache does not hold the first `length` tokens of a request."""
        return self._find_prefix(state.tokens).length >= length

    def _find_prefix(self, tokens: np.ndarray) -> Prefix:
        found = self._pool.match_prompt(tokens, self._given)
        if self._snapshots is None:
            return found
        full = len(found.blocks) * self._size
        # After a full block there may be anything.
        has = full + (1 if found.source is None else self._pool.count_tokens(found.source))
        resumed = self._snapshots.resume_prompt(tokens, found.length, has=has)
        shortened = found.shorten(resumed.length, self._size)
        return shortened._replace(state_place=resumed.state_place, cut=resumed.cut)

    def count_room(self, state: RequestState, prefix: Prefix) -> int:
        """Return by how many tokens a request could advance with what is left."""
        if self._rows_are_blocks:
            return len(state.tokens)
        blocks = self._available - len(self._claims)
        if state.slot is not None:
            blocks += state.arrival in self._claims
            return (len(self._rows[state.slot]) + blocks) * self._size - state.computed
        return (len(prefix.blocks) + blocks - self._count_revived(prefix)) * self._size - prefix.length

    def close_starts(self) -> None:
        """Let no further request start."""
        self._closed = True

    def take_tokens(self, state: RequestState, row: int, prefix: Prefix, count: int) -> None:
        """Give a request what it needs to advance by `count` tokens."""
        if state.slot is not None:
            if not self._rows_are_blocks:
                self._assign_blocks(state, row, len(self._rows[row]), NO_PREFIX, state.computed + count)
            return
        if not self._rows_are_blocks:
            revived = self._count_revived(prefix)
            self._unpromised = self._count_unpromised() - self._count_needed(state, len(prefix.blocks)) - revived
            self._available -= revived
            self._revived.update(block for block in prefix.blocks if not self._pool.count_rows(block))
        self._starts += 1
        self._assign_blocks(state, row, 0, prefix, prefix.length + count)

    def complete_step(self, step: Step, running: Mapping[int, RequestState]) -> Step:
        """Return a step with what is done to the cache before its graph runs.

        Args:
            running: requests that decode, by row; those of the step get what they need.
        """
        for decode in step.decodes if self._claims else ():
            if decode.arrival in self._claims:
                first = len(self._rows[decode.slot])
                self._assign_blocks(running[decode.slot], decode.slot, first, NO_PREFIX, (first + 1) * self._size)
        blocks = tuple(self.preempted), tuple(self.assignments), tuple(self.copies)
        return Step(step.graph, step.decodes, step.pieces, step.passed_over, *blocks)

    def _assign_blocks(self, state: RequestState, row: int, first: int, prefix: Prefix, end: int) -> None:
        """Give a row blocks from its block `first` on for tokens up to place `end`."""
        count = -(-end // self._size) - first - len(prefix.blocks)
        fresh = [row] if self._rows_are_blocks else self._pick_blocks(prefix, count, self._candidates)
        self._given.update(fresh)
        self._available -= count
        self._claims.discard(state.arrival)
        if prefix.source is not None and fresh[0] != prefix.source:
            self.copies.append(BlockCopy(prefix.source, fresh[0], prefix.length - len(prefix.blocks) * self._size))
        blocks = (*prefix.blocks, *fresh)
        if blocks:
            name = state.request.request_id
            self.assignments.append(Assignment(name, row, first, blocks, len(prefix.blocks), state.arrival))

    def _pick_blocks(self, prefix: Prefix, count: int, candidates: Iterator[int]) -> list[int]:
        """Return blocks to write to: the one that is continued in place, then those that are given away first."""
        picked = []
        if count and prefix.ends and prefix.source is not None and self._is_left(prefix.source):
            picked = [prefix.source]
        others = (block for block in candidates if self._is_left(block) and block not in picked)
        return [*picked, *islice(others, count - len(picked))]

    def _is_left(self, block: int) -> bool:
        return block not in self._given and block not in self._revived

    def _needs_block(self, state: RequestState) -> bool:
        assert state.slot is not None
        return state.cached >= len(self._rows[state.slot]) * self._size

    def _preempt_last(self) -> list[int]:
        """Preempt requests, the last by priority and arrival first, until the others' claims are met; return the blocks that become free."""
        self._holders.sort(key=attrgetter("order"))
        returned: Counter[int] = Counter()
        released: list[int] = []
        while len(self._claims) > self._available:
            state = self._holders.pop()
            assert state.slot is not None
            self._claims.discard(state.arrival)
            self.preempted.append(RequestRow(state.request.request_id, state.slot, state.arrival))
            for block in self._rows[state.slot]:
                returned[block] += 1
                if returned[block] == self._pool.count_rows(block):
                    released.append(block)
                    self._available += 1
        return released

    def _count_needed(self, state: RequestState, has: int) -> int:
        """Return the blocks that a request lacks for all its tokens, and one more if it may get so long."""
        longest = len(state.request.prompt_token_ids) + state.max_new_tokens - 1
        return min(-(-state.context // self._size) + 1, -(-longest // self._size)) - has

    def _count_unpromised(self) -> int:
        """Return the blocks beyond all that requests with a row may need soon; what they took in this step was theirs to take."""
        if self._unpromised is None:
            held = ((state, len(self._rows[state.slot])) for state in self._holders if state.slot is not None)
            self._unpromised = self._pool.free_count - sum(self._count_needed(state, has) for state, has in held)
        return self._unpromised

    def _count_revived(self, prefix: Prefix) -> int:
        """Return how many blocks of a prefix no row has, which would no longer be free."""
        return sum(not self._pool.count_rows(block) and block not in self._revived for block in prefix.blocks)
