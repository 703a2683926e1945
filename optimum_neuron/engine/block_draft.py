# SPDX-License-Identifier: Apache-2.0
"""What a step gives out of a cache of blocks: who has to give theirs back, who may start, and which blocks rows get.

Changes nothing. Of the requests that have a row, all can go on by a token at least once the last ones, by priority and then by
arrival, have given theirs back: each has a claim to the block that its next token needs. So the first always advances.

A request starts only where blocks remain for all its tokens and one more, beside those that the others still need for theirs
and one more each. All of them decode for `block_length` steps with no more than that, so nobody is preempted that soon after
a start: blocks do not go back and forth, and what is computed twice is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter

import numpy as np

from .block_pool import NO_MATCH, BlockMatch, BlockPool
from .placement import Placement
from .request import RequestState
from .snapshots import Resumption, SnapshotTable
from .step import Assignment, BlockCopy, Preempted, PrefixReuse, Step


class BlockDraft:
    """A step's use of blocks so far.

    Args:
        rows: the blocks of each row.
        free_rows: ascending.
        holders: all requests that have a row.
        snapshots: of state that rows keep beside blocks; None where they keep none.

    Attributes:
        preempted: who gives back what they have, the last by priority and arrival first.
        assignments, copies: as in `Step`.
    """

    def __init__(
        self,
        pool: BlockPool,
        rows: Sequence[Sequence[int]],
        free_rows: Sequence[int],
        holders: Iterable[RequestState],
        snapshots: SnapshotTable | None = None,
    ) -> None:
        self._pool = pool
        self._snapshots = snapshots
        self._size = pool.block_length
        self._rows = rows
        self._free_rows = free_rows
        self._holders = list(holders)
        self._available = pool.free_count
        self._claims = {state.arrival for state in self._holders if self._needs_block(state)}
        self.preempted: list[Preempted] = []
        self.assignments: list[Assignment] = []
        self.copies: list[BlockCopy] = []
        released = self._preempt() if len(self._claims) > self._available else ()
        self._candidates: Iterator[int] = chain(pool.candidates(), released)
        self._given: set[int] = set()
        self._revived: set[int] = set()
        self._starts = 0
        self._unpromised: int | None = None
        self._closed = bool(self.preempted)

    @property
    def open_slots(self) -> int:
        """Rows that requests may still start in; none where somebody was preempted, or has to wait for blocks."""
        return 0 if self._closed else len(self._free_rows) - self._starts

    def place(self, state: RequestState, reuse: bool) -> Placement | None:
        if state.slot is not None:
            return Placement(state.slot, None)
        found, resumed = self._find(state.tokens) if reuse else (NO_MATCH, Resumption(0))
        if self._needed(state, len(found.shared)) + self._revives(found) > self._free_to_promise():
            return None
        known = PrefixReuse(None, resumed.length, resumed.snapshot) if resumed.length else None
        return Placement(self._free_rows[self._starts], known, found, resumed.parts_at)

    def may_share(self, state: RequestState, length: int) -> bool:
        return self._find(state.tokens)[1].length >= length

    def _find(self, tokens: np.ndarray) -> tuple[BlockMatch, Resumption]:
        """Blocks with the first tokens of a request, and where it goes on: behind these, or where a snapshot is."""
        found = self._pool.match(tokens, self._given)
        full = len(found.shared) * self._size
        if self._snapshots is None:
            return found, Resumption(full + found.common)
        # Behind a full block there may be anything.
        has = full + (self._pool.length(found.source) if found.common else 1)
        resumed = self._snapshots.resume(tokens, full + found.common, has=has)
        return found.first(resumed.length, self._size), resumed

    def room(self, state: RequestState, placement: Placement | None) -> int:
        blocks = self._available - len(self._claims)
        if state.slot is not None:
            blocks += state.arrival in self._claims
            return (len(self._rows[state.slot]) + blocks) * self._size - state.computed
        if placement is None:
            return 0
        found = placement.found
        return (len(found.shared) + blocks - self._revives(found)) * self._size - placement.start

    def close(self) -> None:
        self._closed = True

    def take(self, state: RequestState, placement: Placement, count: int) -> None:
        found, first = placement.found, 0
        if state.slot is not None:
            first = len(self._rows[state.slot])
        else:
            self._unpromised = self._free_to_promise() - self._needed(state, len(found.shared)) - self._revives(found)
            self._available -= self._revives(found)
            self._revived.update(block for block in found.shared if not self._pool.references(block))
            self._starts += 1
        end = (placement.start if state.slot is None else state.computed) + count
        self._assign(state, placement.slot, first, found, -(-end // self._size))

    def complete(self, step: Step, running: Mapping[int, RequestState]) -> Step:
        for decode in step.decodes if self._claims else ():
            if decode.arrival in self._claims:
                first = len(self._rows[decode.slot])
                self._assign(running[decode.slot], decode.slot, first, NO_MATCH, first + 1)
        blocks = tuple(self.preempted), tuple(self.assignments), tuple(self.copies)
        return Step(step.graph, step.decodes, step.chunks, step.passed_over, *blocks)

    def _assign(self, state: RequestState, slot: int, first: int, found: BlockMatch, end: int) -> None:
        count = end - first - len(found.shared)
        fresh: list[int] = []
        if count and found.ends and self._is_left(found.source):  # it is continued in place
            fresh = [found.source]
            self._given.add(found.source)
        fresh += islice(filter(self._is_left, self._candidates), count - len(fresh))
        self._given.update(fresh)
        self._available -= count
        self._claims.discard(state.arrival)
        if found.common and fresh[0] != found.source:
            self.copies.append(BlockCopy(found.source, fresh[0], found.common))
        blocks = (*found.shared, *fresh)
        if blocks:
            name = state.request.request_id
            self.assignments.append(Assignment(name, slot, first, blocks, len(found.shared), state.arrival))

    def _is_left(self, block: int) -> bool:
        return block not in self._given and block not in self._revived

    def _needs_block(self, state: RequestState) -> bool:
        assert state.slot is not None
        return state.cached >= len(self._rows[state.slot]) * self._size

    def _preempt(self) -> list[int]:
        """Takes requests out, the last by priority and arrival first, until the others' claims are met; returns the blocks that become free."""
        self._holders.sort(key=attrgetter("order"))
        returned: Counter[int] = Counter()
        released: list[int] = []
        while len(self._claims) > self._available:
            state = self._holders.pop()
            assert state.slot is not None
            self._claims.discard(state.arrival)
            self.preempted.append(Preempted(state.request.request_id, state.slot, state.arrival))
            for block in self._rows[state.slot]:
                returned[block] += 1
                if returned[block] == self._pool.references(block):
                    released.append(block)
                    self._available += 1
        return released

    def _needed(self, state: RequestState, has: int) -> int:
        """Blocks that a request lacks for all its tokens, and one more if it may get so long."""
        longest = len(state.request.prompt_token_ids) + state.max_new_tokens - 1
        return min(-(-state.context // self._size) + 1, -(-longest // self._size)) - has

    def _free_to_promise(self) -> int:
        """Blocks beyond all that those who have a row may need soon: what these took in this step was theirs to take."""
        if self._unpromised is None:
            held = ((state, len(self._rows[state.slot])) for state in self._holders if state.slot is not None)
            self._unpromised = self._pool.free_count - sum(self._needed(state, has) for state, has in held)
        return self._unpromised

    def _revives(self, found: BlockMatch) -> int:
        """Blocks of a match that nobody has, and that would therefore be free no more."""
        return sum(not self._pool.references(block) and block not in self._revived for block in found.shared)
