# SPDX-License-Identifier: Apache-2.0
"""The rows of a step that requests have, and what of the cache is in them: slots or blocks, as vLLM's block manager gave them out.

Block 0 of vLLM's is nobody's, so that its block b is block b - 1 of the artifact, or slot b - 1 unless the step's plan names another.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol

from ..runtime.runner import GraphRunner
from ..runtime.step_rows import Prefix, StepRows
from ..runtime.step_tensors import chunks_of
from .requests import NO_ROW, SlotRequest


class CacheRows(Protocol):
    """Follows what vLLM decided; `blocks` are vLLM's."""

    def start(
        self, state: SlotRequest, blocks: Sequence[int], computed: int, source: Prefix | None, snapshot: int | None
    ) -> None:
        """Gives a request a row that holds its first `computed` tokens.

        Args:
            source: what to take them from, where it is another slot.
            snapshot: of the state behind them, where they are in its blocks.
        """

    def extend(self, state: SlotRequest, blocks: Sequence[int]) -> None:
        """Gives a request that has a row these blocks behind its own."""

    def release(self, state: SlotRequest) -> None:
        """Takes the row from a request that has ended or was preempted; nothing where it has none."""


class SlotRows:
    """Of a cache of slots: a request has one block, and its row is that slot."""

    def __init__(self, rows: StepRows[SlotRequest], runner: GraphRunner) -> None:
        self._rows, self._runner = rows, runner

    def start(
        self, state: SlotRequest, blocks: Sequence[int], computed: int, source: Prefix | None, snapshot: int | None
    ) -> None:
        held, state.slot = state.slot, blocks[0] - 1
        continues = source is None and computed > 0 and held == state.slot  # the next turn of a session
        if continues and self._runner.kept.needed and self._runner.lengths[held] != computed:
            self._rows.start(state, None)
            _compute(self._runner, state, computed)
            return
        self._rows.start(state, Prefix(held, computed) if continues else source)

    def extend(self, state: SlotRequest, blocks: Sequence[int]) -> None:
        raise RuntimeError(
            f"request {state.request_id} has a whole slot and is given the blocks {list(blocks)} beside it"
        )

    def release(self, state: SlotRequest) -> None:
        state.slot = NO_ROW


class BlockRows:
    """Of a cache of blocks: a request has the first row that is free, and in it any blocks. Those that it starts with tokens in were
    computed before, or are by a prompt of this very step: graphs write a layer's keys and values before they read any."""

    def __init__(self, rows: StepRows[SlotRequest], runner: GraphRunner) -> None:
        assert runner.tables is not None
        self._rows, self._runner, self._tables = rows, runner, runner.tables
        self._free = list(range(runner.config.batch_size))

    def start(
        self, state: SlotRequest, blocks: Sequence[int], computed: int, source: Prefix | None, snapshot: int | None
    ) -> None:
        if state.slot == NO_ROW:
            state.slot = heappop(self._free)
        self._rows.start(state, None)
        self.extend(state, blocks)
        if computed and self._runner.kept.needed and snapshot is None:  # the next turn of a session
            _compute(self._runner, state, computed)
        elif computed:
            self._runner.resume(state.slot, computed, snapshot)

    def extend(self, state: SlotRequest, blocks: Sequence[int]) -> None:
        self._runner.assign(state.slot, int(self._tables.counts[state.slot]), [block - 1 for block in blocks])

    def release(self, state: SlotRequest) -> None:
        if state.slot != NO_ROW:
            self._runner.reset(state.slot)
            heappush(self._free, state.slot)
            state.slot = NO_ROW


def cache_rows(rows: StepRows[SlotRequest], runner: GraphRunner) -> CacheRows:
    """What fits the artifact's cache."""
    return SlotRows(rows, runner) if runner.tables is None else BlockRows(rows, runner)


def _compute(runner: GraphRunner, state: SlotRequest, count: int) -> None:
    """Takes the first tokens of a session's turn in once more. A step that was on its way when the turn before ended has added a token that
    vLLM drops, and a slot's state is of all its tokens."""
    for chunk in chunks_of(state.slot, state.prefill_token_ids[:count], runner.config.prefill_chunk_size):
        runner.step([chunk], outputs=False)
