# SPDX-License-Identifier: Apache-2.0
"""Which waiting requests vLLM has cache for, told before it schedules: chunk rows go to nobody whom it would then refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vllm.v1.request import Request

from ..engine.slots import SlotDraft, SlotTable
from .block_snapshots import BlockSnapshots
from .scheduler_hooks import HookedScheduler


class CacheRoom(Protocol):
    """What a step's planner asks of the cache.

    Attributes:
        reuses: whether the draft tells what prompts need not compute.
    """

    reuses: bool

    def admissible(self, waiting: Sequence[Request]) -> Mapping[str, int]:
        """The first requests, as far as there is cache for them, and how many tokens of each vLLM's prefix cache holds."""

    def draft(self, starts: int) -> SlotDraft:
        """What requests that start can have, of whom there may be so many."""


class BlockRoom:
    """Of vLLM's own block manager; a slot is a block of a whole sequence.

    Args:
        snapshots: without which nobody goes on behind a prefix, where rows keep state.
    """

    reuses = False  # vLLM's prefix cache tells

    def __init__(self, scheduler: HookedScheduler, snapshots: BlockSnapshots | None) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._snapshots = snapshots

    def admissible(self, waiting: Sequence[Request]) -> Mapping[str, int]:
        scheduler, size = self._scheduler, self._scheduler.block_size
        found: dict[str, int] = {}
        room = self._room() if waiting else 0
        for request in waiting:
            shared, cached = self._cached(request)
            tokens = request.num_tokens if scheduler.scheduler_reserve_full_isl else cached + 1
            # Of blocks that nobody has, those that hold its prefix are free, too.
            room -= -(-tokens // size) - sum(block.ref_cnt > 0 for block in shared)
            if room < 0:
                break
            found[request.request_id] = cached
        return found

    def draft(self, starts: int) -> SlotDraft:
        return SlotTable(starts, 1).draft()

    def _room(self) -> int:
        """Blocks beside those that running requests take in this step, or need for what is left of their prompts."""
        scheduler, manager = self._scheduler, self._manager
        if not scheduler.running:
            return manager.block_pool.get_num_free_blocks()
        grown = sum(
            not request.is_prefill_chunk and request.num_computed_tokens % scheduler.block_size == 0
            for request in scheduler.running
        )
        kept = scheduler.reserved_blocks() + manager.watermark_blocks
        return manager.block_pool.get_num_free_blocks() - grown - kept

    def _cached(self, request: Request) -> tuple[Sequence[Any], int]:
        """Blocks that hold the start of a prompt and that it starts with, and how many tokens."""
        blocks: Sequence[Any] = ()
        tokens = 0
        if self._manager.prefix_cache_lookup_enabled(request):
            (blocks,), tokens, _ = self._manager.coordinator.find_longest_cache_hit(
                request.block_hashes, request.num_tokens - 1
            )
        if self._snapshots is not None:
            tokens = self._snapshots.start(request, tokens)
        return blocks[: tokens // self._scheduler.block_size], tokens
