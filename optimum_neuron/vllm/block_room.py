# SPDX-License-Identifier: Apache-2.0
"""The waiting requests that vLLM has cache for, found before it schedules: no chunk row is kept for one that it would refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from vllm.v1.request import Request

from ..config import NeuronConfig
from ..engine.block_draft import BlockDraft
from ..engine.block_table import BlockTable
from .block_snapshots import BlockSnapshots
from .scheduler_hooks import HookedScheduler


class CacheRoom(Protocol):
    """The cache as a step's planner needs it.

    Attributes:
        reuses: whether the draft finds prefixes of prompts.
    """

    reuses: bool

    def find_admissible(self, waiting: Sequence[Request]) -> Mapping[str, int]:
        """Return the first requests, as far as there is cache for them, with how many tokens of each vLLM's prefix cache holds."""

    def draft_starts(self, starts: int) -> BlockDraft:
        """Return what requests that start can have; at most `starts` may."""


class BlockRoom:
    """The room of vLLM's own block manager.

    Args:
        snapshots: without which no prompt continues after a prefix, where rows keep state.
    """

    reuses = False  # vLLM's prefix cache finds them

    def __init__(self, scheduler: HookedScheduler, config: NeuronConfig, snapshots: BlockSnapshots | None) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._snapshots = snapshots
        # Rows that hold nothing and have room for any prompt: vLLM counts the blocks.
        self._rows = BlockTable(replace(config, kv_block_size=None, kv_cache_tokens=None))

    def find_admissible(self, waiting: Sequence[Request]) -> Mapping[str, int]:
        scheduler, size = self._scheduler, self._scheduler.block_size
        found: dict[str, int] = {}
        room = self._count_room() if waiting else 0
        for request in waiting:
            shared, cached = self._find_cached(request)
            tokens = request.num_tokens if scheduler.scheduler_reserve_full_isl else cached + 1
            # Blocks of its prefix that no request has are free, too.
            room -= -(-tokens // size) - sum(block.ref_cnt > 0 for block in shared)
            if room < 0:
                break
            found[request.request_id] = cached
        return found

    def draft_starts(self, starts: int) -> BlockDraft:
        return self._rows.draft_step(most_starts=starts)

    def _count_room(self) -> int:
        """Return the blocks beyond those that running requests take in this step, or need for what is left of their prompts."""
        scheduler, manager = self._scheduler, self._manager
        if not scheduler.running:
            return manager.block_pool.get_num_free_blocks()
        grown = sum(
            not request.is_prefill_chunk and request.num_computed_tokens % scheduler.block_size == 0
            for request in scheduler.running
        )
        kept = scheduler.count_reserved() + manager.watermark_blocks
        return manager.block_pool.get_num_free_blocks() - grown - kept

    def _find_cached(self, request: Request) -> tuple[Sequence[Any], int]:
        """Return blocks that hold the start of a prompt and that it starts with, and how many tokens."""
        blocks: Sequence[Any] = ()
        tokens = 0
        if self._manager.prefix_cache_lookup_enabled(request):
            (blocks,), tokens, _ = self._manager.coordinator.find_longest_cache_hit(
                request.block_hashes, request.num_tokens - 1
            )
        if self._snapshots is not None:
            tokens = self._snapshots.find_start(request, tokens)
        return blocks[: tokens // self._scheduler.block_size], tokens
