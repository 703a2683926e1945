# SPDX-License-Identifier: Apache-2.0
"""The prompts that a step of vLLM's scheduler takes in: those that the cache has room for, and how much of each by the rules of `Engine`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request as VllmRequest

from ..config import NeuronConfig
from ..core import Request
from ..engine.block_table import BlockDraft, BlockTable
from ..engine.planner import PromptLimits, plan_prompts
from ..engine.policy import SchedulerOptions
from ..engine.queues import RequestState
from .prefixes import BlockPrefixes


# Steps in a row in which short prompts or decodes alone may go before a long prompt: it takes every third step at least.
MAX_BYPASS = 2
# In place of each token of a prompt that declines to reuse any: no slot holds it.
_NO_TOKEN = np.iinfo(np.int32).max


class PromptPlanner:
    """Gives vLLM's requests to the planner, and remembers which were passed over.

    All are equal but `by_priority`; with `reuse`, prompts reuse what slots hold, rather than vLLM's blocks.
    """

    def __init__(self, config: NeuronConfig, *, by_priority: bool, reuse: bool) -> None:
        self._by_priority = by_priority
        self._limits = PromptLimits(
            options=SchedulerOptions(max_bypass=MAX_BYPASS, prefix_reuse=reuse),
            rows=config.ctx_batch_size,
            chunk_sizes=config.chunk_sizes,
            largest_chunk=config.prefill_chunk_size,
            tokens=config.prompt_capacity,
            tokens_per_prompt=config.sequence_length,
        )
        self._arrivals = itertools.count()
        self._states: WeakKeyDictionary[VllmRequest, RequestState] = WeakKeyDictionary()

    def plan_tokens(
        self,
        requests: Sequence[VllmRequest],
        cached: Mapping[str, int],
        slots: BlockDraft,
        tokens: int,
        tokens_per_prompt: int,
        *,
        cuts: Mapping[str, int],
        decodes_first: bool,
    ) -> dict[str, int]:
        """Return how many tokens of which prompt the next step takes in. Call it once for each step.

        Args:
            requests: those with prompt tokens to compute, in vLLM's order. The first has a slot or finds one.
            cached: of those that have not begun, tokens that vLLM's prefix cache holds.
            tokens, tokens_per_prompt: prompt tokens that the step has room for, and that one prompt may take of it.
            cuts: where in requests pieces are to end, further to those that `slots` finds; 0: nowhere.
            decodes_first: no prompt gets a token where none would end in the step or come to a cut, as often as one may be passed over.
        """
        states = [
            self._find_state(request, cached.get(request.request_id, 0), cuts.get(request.request_id, 0))
            for request in requests
        ]
        if self._by_priority:
            states.sort(key=lambda state: state.request.priority)
        most = min(tokens, self._limits.tokens)
        limits = replace(self._limits, tokens=most, tokens_per_prompt=tokens_per_prompt)
        planned, passed_over = plan_prompts(states, slots, limits)
        ends = any(piece.is_last or piece.end == piece.cut for piece in planned)
        if decodes_first and states[0].bypassed < MAX_BYPASS and not ends:
            states[0].bypassed += 1
            return {}
        pieces = {piece.request_id: piece for piece in planned}
        for state in states:
            if (piece := pieces.get(state.request.request_id)) is not None:
                state.bypassed, state.cut = 0, piece.cut
        if passed_over is not None:
            states[0].bypassed += 1
        return {name: piece.count for name, piece in pieces.items()}

    def _find_state(self, request: VllmRequest, cached: int, cut: int) -> RequestState:
        """Return a request as the planner sees it: cached tokens of one that has not begun are no part of its prompt.

        One that was preempted has a longer prompt than before, as has a session.
        """
        state = self._states.get(request)
        begin = 0 if request.num_computed_tokens else cached
        if state is None or len(state.request.prompt_token_ids) != request.num_tokens - begin:
            bypassed = 0 if state is None else state.bypassed
            if request.skip_reading_prefix_cache:
                tokens = np.full(request.num_tokens, _NO_TOKEN, np.int32)
            else:
                tokens = np.asarray(request.all_token_ids[begin:], np.int32)
            priority = request.priority if self._by_priority else 0
            prompt = Request(request_id=request.request_id, prompt_token_ids=tokens, priority=priority)
            state = self._states[request] = RequestState(prompt, next(self._arrivals), 1)
            state.bypassed = bypassed
        state.computed = request.num_computed_tokens
        # A request has a row as soon as something of it is computed; vLLM knows which.
        state.slot = 0 if request.num_computed_tokens else None
        if cut or state.slot is None:
            state.cut = max(0, cut - begin)
        return state


class BlockRoom:
    """The room of vLLM's own block manager: no chunk row is kept for a request that it would refuse."""

    reuses = False  # vLLM's prefix cache finds them

    def __init__(self, scheduler: Scheduler, config: NeuronConfig, prefixes: BlockPrefixes | None) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._prefixes = prefixes
        # Rows that hold nothing and have room for any prompt: vLLM counts the blocks.
        self._rows = BlockTable(replace(config, kv_block_size=None, kv_cache_tokens=None))

    def find_admissible(self, waiting: Sequence[VllmRequest]) -> Mapping[str, int]:
        """Return the first requests, as far as there is cache for them, with how many tokens of each vLLM's prefix cache holds."""
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
        """Return what requests that start can have; at most `starts` may."""
        return BlockDraft(self._rows, most_starts=starts)

    def _count_room(self) -> int:
        """Return the blocks beyond those that running requests take in this step, or need for what is left of their prompts."""
        scheduler, manager = self._scheduler, self._manager
        free: int = manager.block_pool.get_num_free_blocks()
        if not scheduler.running:
            return free
        grown = sum(
            not request.is_prefill_chunk and request.num_computed_tokens % scheduler.block_size == 0
            for request in scheduler.running
        )
        reserved = int(scheduler._inflight_prefill_reserved_blocks())  # vLLM has no public count
        return free - grown - reserved - manager.watermark_blocks

    def _find_cached(self, request: VllmRequest) -> tuple[Sequence[Any], int]:
        """Return blocks that hold the start of a prompt and that it starts with, and how many tokens."""
        blocks: Sequence[Any] = ()
        tokens = 0
        if self._manager.prefix_cache_lookup_enabled(request):
            (blocks,), tokens, _ = self._manager.coordinator.find_longest_cache_hit(
                request.block_hashes, request.num_tokens - 1
            )
        if self._prefixes is not None:
            tokens = self._prefixes.find_start(request, tokens)
        return blocks[: tokens // self._scheduler.block_size], tokens
