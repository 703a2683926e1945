# SPDX-License-Identifier: Apache-2.0
"""The rows of a step that requests have, and the blocks in each, as vLLM's block manager gave them out.

Block 0 of vLLM's is never given out, so that its block b is block b - 1 of the artifact. Where the cache has slots, a request
has one block, and its row has the same number; the step's plan may name another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from ..core import Prefix
from ..runtime.prefill import cut_prompt
from ..runtime.runner import GraphRunner
from ..runtime.step_rows import StepRows
from .requests import NO_ROW, RowState


class CacheRows:
    """The rows of the cache. Requests start with tokens that were computed before, or that a prompt of this very step computes:
    graphs write a layer's keys and values before they read any."""

    def __init__(self, rows: StepRows[RowState], runner: GraphRunner) -> None:
        self._rows, self._runner = rows, runner
        self._has_slots = runner.tables is None
        self._free = list(range(runner.config.batch_size))

    def start_request(self, state: RowState, blocks: Sequence[int], computed: int, prefix: Prefix | None) -> None:
        """Give a request a row that holds its first `computed` tokens.

        Args:
            blocks: vLLM's.
            prefix: the slot to copy them from, and the snapshot of the state after them.
        """
        runner, held = self._runner, state.slot
        if self._has_slots:
            state.slot = blocks[0] - 1
        elif held == NO_ROW:
            state.slot = heappop(self._free)
        has_turn = computed > 0 and prefix is None  # the next turn of a session, or whole blocks of a prompt
        if self._has_slots and has_turn and held == state.slot and runner.lengths[held] == computed:
            self._rows.start_request(state, resets=False)
            return
        self._rows.start_request(state)
        self.extend_row(state, blocks if not self._has_slots else [state.slot + 1])
        if prefix is not None and prefix.source is not None and prefix.source != state.slot:
            runner.copy_block(prefix.source, state.slot, prefix.length)
        if has_turn and runner.kept.needed:
            self._compute_again(state, computed)
        elif computed and (prefix is not None or not self._has_slots or held == state.slot):
            runner.resume_slot(state.slot, computed, None if prefix is None else prefix.snapshot)

    def extend_row(self, state: RowState, blocks: Sequence[int]) -> None:
        """Give a request that has a row more of vLLM's blocks."""
        tables = self._runner.tables
        first = 0 if tables is None else int(tables.counts[state.slot])
        self._runner.assign_blocks(state.slot, first, [block - 1 for block in blocks])

    def release_row(self, state: RowState) -> None:
        """Take the row from a request that has ended or was preempted; do nothing where it has none."""
        if not self._has_slots and state.slot != NO_ROW:
            self._runner.reset_slot(state.slot)
            heappush(self._free, state.slot)
        state.slot = NO_ROW

    def _compute_again(self, state: RowState, count: int) -> None:
        """Take in the first tokens of a session's turn once more.

        A step that was under way when the turn before ended has added a token that vLLM drops, and a slot's state is of all its
        tokens.
        """
        for piece in cut_prompt(state.slot, state.prefill_token_ids[:count], self._runner.config.prefill_chunk_size):
            self._runner.run_step([piece], outputs=False)
