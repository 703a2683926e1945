# SPDX-License-Identifier: Apache-2.0
"""The rows of a step that requests have, and what of the cache is in them: slots or blocks, as vLLM's block manager gave them out.

Block 0 of vLLM's is nobody's, so that its block b is slot b - 1, or block b - 1, of the artifact.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol

from ..runtime.runner import GraphRunner
from ..runtime.step_rows import Prefix, StepRows
from .requests import NO_ROW, SlotRequest


class CacheRows(Protocol):
    """Follows what vLLM decided; `blocks` are vLLM's."""

    def start(self, state: SlotRequest, blocks: Sequence[int], computed: int, source: Prefix | None) -> None:
        """Gives a request a row that holds its first `computed` tokens.

        Args:
            source: what to take them from, where it is another slot.
        """

    def extend(self, state: SlotRequest, blocks: Sequence[int]) -> None:
        """Gives a request that has a row these blocks behind its own."""

    def release(self, state: SlotRequest) -> None:
        """Takes the row from a request that has ended or was preempted; nothing where it has none."""


class SlotRows:
    """Of a cache of slots: a request has one block, and its row is that slot."""

    def __init__(self, rows: StepRows[SlotRequest]) -> None:
        self._rows = rows

    def start(self, state: SlotRequest, blocks: Sequence[int], computed: int, source: Prefix | None) -> None:
        held, state.slot = state.slot, blocks[0] - 1
        if source is None and computed and held == state.slot:
            source = Prefix(held, computed)  # the next turn of a session goes on behind what its own slot holds
        self._rows.start(state, source)

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

    def start(self, state: SlotRequest, blocks: Sequence[int], computed: int, source: Prefix | None) -> None:
        if state.slot == NO_ROW:
            state.slot = heappop(self._free)
        self._rows.start(state, None)
        self.extend(state, blocks)
        if computed:
            self._runner.resume(state.slot, computed)

    def extend(self, state: SlotRequest, blocks: Sequence[int]) -> None:
        self._runner.assign(state.slot, int(self._tables.counts[state.slot]), [block - 1 for block in blocks])

    def release(self, state: SlotRequest) -> None:
        if state.slot != NO_ROW:
            self._runner.reset(state.slot)
            heappush(self._free, state.slot)
            state.slot = NO_ROW


def cache_rows(rows: StepRows[SlotRequest], runner: GraphRunner) -> CacheRows:
    """What fits the artifact's cache."""
    return SlotRows(rows) if runner.tables is None else BlockRows(rows, runner)
