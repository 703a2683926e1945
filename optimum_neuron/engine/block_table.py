# SPDX-License-Identifier: Apache-2.0
"""Rows of a cache with their blocks, and what one step makes of them. A slot is a row that is one block, of the same number.

Of the requests that have a row, all can advance by a token at least once the last ones, by priority and then by arrival, have
given their blocks back: each has a claim to the block that its next token needs. So the first always advances.

A request starts only where blocks remain for all its tokens and one more, next to those that the others still need for theirs
and one more each. All of them decode for `block_length` steps with no more than that, so none is preempted that soon after
a start: blocks do not go back and forth, and what is computed twice is bounded.

Where rows are blocks, each holds the longest request: a request that has one needs nothing more, and none is preempted.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter

import numpy as np

from ..config import NeuronConfig
from ..core import Assignment, BlockCopy, KeptState, Prefix, RequestRow, Step
from .block_pool import MIN_REUSE, BlockPool
from .queues import RequestState
from .snapshots import StatePool


NO_PREFIX = Prefix()


class BlockTable:
    """The rows of a cache and the blocks of each.

    Args:
        min_reuse: tokens that a part of a block must have to be copied.
        state_places: places for state that rows keep next to blocks; None where they keep none.

    Attributes:
        has_slots: whether each row is one block.
        free_rows: those that no request holds, ascending.
        blocks: of each row, in order.
        known: tokens of each row that its blocks' contents have; below 0 where contents were forgotten while it was held.
    """

    def __init__(self, config: NeuronConfig, min_reuse: int = MIN_REUSE, state_places: int | None = None) -> None:
        if state_places is None:
            self.pool = BlockPool(config.kv_blocks, config.block_length, min_reuse)
        else:
            self.pool = StatePool(config, min_reuse, state_places)
        self.has_slots = config.kv_block_size is None
        self.free_rows = list(range(config.batch_size))
        self.blocks: list[list[int]] = [[] for _ in self.free_rows]
        self.known = [0] * config.batch_size
        self._holders: list[str | None] = [None] * config.batch_size
        self._size = config.kv_blocks

    @property
    def used_blocks(self) -> int:
        """Blocks that requests have."""
        return self._size - self.pool.free_count

    def hold_row(self, row: int, request_id: str) -> None:
        """Give a row to a request; RuntimeError where another one holds it."""
        if self._holders[row] is not None:
            raise RuntimeError(f"row {row} is held by request {self._holders[row]!r}, not free for {request_id!r}")
        self._holders[row] = request_id
        self.free_rows.remove(row)

    def release_row(self, row: int) -> None:
        """Take back a row and its blocks, which keep what they contain; RuntimeError where no request holds the row."""
        if self._holders[row] is None:
            raise RuntimeError(f"row {row} is free and cannot be released")
        self._holders[row] = None
        insort(self.free_rows, row)
        self.pool.release_blocks(self.blocks[row])
        self.blocks[row], self.known[row] = [], 0

    def apply_step(self, step: Step, live: Callable[[Assignment | KeptState], RequestState | None]) -> None:
        """Follow what a step did. `live` returns a request; None where it was aborted since, so that its new blocks are void."""
        self.pool.follow_step(step, live)
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
        self.blocks[row] += blocks
        self.known[row] += shared * self.pool.block_length

    def write_tokens(self, row: int, start: int, tokens: np.ndarray | Sequence[int]) -> None:
        """Add to what a row's blocks contain the tokens from place `start` on, as far as they are not known yet."""
        known = self.known[row]
        if start <= known:
            self.pool.write_tokens(self.blocks[row], known, tokens[known - start :])
            self.known[row] = start + len(tokens)

    def append_token(self, row: int, token_id: int) -> None:
        """Add one token to what is known of a row."""
        known = self.known[row]
        if known >= 0:
            self.pool.append_token(self.blocks[row], known, token_id)
            self.known[row] = known + 1

    def void_row(self, row: int) -> None:
        """Void the contents of a row that shares none of its blocks; it is written again from its start."""
        for block in self.blocks[row]:
            self.pool.void_block(block)
        self.known[row] = 0

    def forget_all(self) -> None:
        """Forget all contents and state, and the contents to come of rows that are held."""
        self.pool.forget_all()
        self.known = [0 if holder is None else -1 for holder in self._holders]


class BlockDraft:
    """A step's use of blocks so far; changes nothing.

    Args:
        holders: all requests that have a row.
        most_starts: requests that may start, where these are fewer than free rows.

    Attributes:
        preempted: requests that give back what they have, the last by priority and arrival first.
        assignments, copies: as in `Step`.
        is_closed: whether no further request may start.
    """

    def __init__(
        self, table: BlockTable, holders: Iterable[RequestState] = (), most_starts: int | None = None
    ) -> None:
        self._pool, self._rows = table.pool, table.blocks
        self._size = table.pool.block_length
        self._free_rows = table.free_rows[:most_starts]
        self._rows_are_blocks = table.has_slots
        self._holders = [] if table.has_slots else [state for state in holders if state.slot is not None]
        self._available = self._pool.free_count
        self._claims = {
            state.arrival for state in self._holders if state.cached >= self._count_blocks(state) * self._size
        }
        self.preempted: list[RequestRow] = []
        self.assignments: list[Assignment] = []
        self.copies: list[BlockCopy] = []
        released = self._preempt_last() if len(self._claims) > self._available else ()
        self._candidates: Iterator[int] = chain(self._pool.list_free(), released)
        self._given: set[int] = set()
        self._revived: set[int] = set()
        self._starts = 0
        self._unpromised: int | None = None
        self.is_closed = bool(self.preempted)

    @property
    def open_rows(self) -> int:
        """Rows that requests may still start in; none where a request was preempted, or has to wait for blocks."""
        return 0 if self.is_closed else len(self._free_rows) - self._starts

    def place_prompt(
        self, tokens: np.ndarray, reuse: bool, state: RequestState | None = None
    ) -> tuple[int, Prefix] | None:
        """Return the row of a request that starts with these tokens, and its prefix in the cache; None where blocks are too few."""
        prefix = self.find_prefix(tokens) if reuse else NO_PREFIX
        if self._rows_are_blocks:
            return self._pick_blocks(prefix, 1, self._pool.list_free())[0], prefix
        assert state is not None
        if self._count_needed(state, len(prefix.blocks)) + self._count_revived(prefix) > self._count_unpromised():
            return None
        return self._free_rows[self._starts], prefix

    def find_prefix(self, tokens: np.ndarray) -> Prefix:
        """Return what the cache holds of a prompt, but for blocks that the step overwrites."""
        return self._pool.match_prompt(tokens, self._given)

    def count_room(self, state: RequestState, prefix: Prefix) -> int:
        """Return by how many tokens a request could advance with what is left."""
        if self._rows_are_blocks:
            return len(state.tokens)
        blocks = self._available - len(self._claims)
        if state.slot is not None:
            blocks += state.arrival in self._claims
            return (self._count_blocks(state) + blocks) * self._size - state.computed
        return (len(prefix.blocks) + blocks - self._count_revived(prefix)) * self._size - prefix.length

    def take_tokens(self, state: RequestState, row: int, prefix: Prefix, count: int) -> None:
        """Give a request what it needs to advance by `count` tokens."""
        if state.slot is not None:
            if not self._rows_are_blocks:
                self._assign_blocks(state, row, self._count_blocks(state), NO_PREFIX, state.computed + count)
            return
        if not self._rows_are_blocks:
            revived = self._count_revived(prefix)
            self._unpromised = self._count_unpromised() - self._count_needed(state, len(prefix.blocks)) - revived
            self._available -= revived
            self._revived.update(block for block in prefix.blocks if not self._pool.count_rows(block))
        self._starts += 1
        self._assign_blocks(state, row, 0, prefix, prefix.length + count)

    def complete_step(self, step: Step, live: Mapping[str, RequestState]) -> Step:
        """Return a step with what is done to the cache before its graph runs and after. `live` has the requests by id."""
        for decode in step.decodes if self._claims else ():
            if decode.arrival in self._claims:
                first = len(self._rows[decode.slot])
                self._assign_blocks(live[decode.request_id], decode.slot, first, NO_PREFIX, (first + 1) * self._size)
        blocks = tuple(self.preempted), tuple(self.assignments), tuple(self.copies)
        kept = self._pool.plan_states(step.pieces, live)
        return Step(step.graph, step.decodes, step.pieces, step.passed_over, *blocks, kept)

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

    def _count_blocks(self, state: RequestState) -> int:
        """Return the blocks of a request that has a row."""
        return 0 if state.slot is None else len(self._rows[state.slot])

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
            needed = sum(self._count_needed(state, self._count_blocks(state)) for state in self._holders)
            self._unpromised = self._pool.free_count - needed
        return self._unpromised

    def _count_revived(self, prefix: Prefix) -> int:
        """Return how many blocks of a prefix no row has, which would no longer be free."""
        return sum(not self._pool.count_rows(block) and block not in self._revived for block in prefix.blocks)
