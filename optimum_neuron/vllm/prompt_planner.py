# SPDX-License-Identifier: Apache-2.0
"""Which prompts a step of vLLM's scheduler takes in, and how much of each: decided as `Engine` decides it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
from vllm.v1.request import Request as VllmRequest

from ..config import NeuronConfig
from ..engine.planner import ChunkLimits, plan_chunks
from ..engine.request import Request, RequestState
from ..engine.slots import SlotDraft


# Steps in a row in which short prompts or decodes alone may go before a long prompt: it takes every third step at least.
MAX_BYPASS = 2
# Stands for the tokens of a prompt that declines to reuse any: no slot holds it.
_NO_TOKEN = np.iinfo(np.int32).max


class PromptPlanner:
    """Hands vLLM's requests to the planner, and remembers who was passed over.

    Args:
        by_priority: whether vLLM's policy is by priority; otherwise all are equal.
        reuse: whether prompts reuse what slots hold.
    """

    def __init__(self, config: NeuronConfig, *, by_priority: bool, reuse: bool) -> None:
        self._by_priority = by_priority
        self._limits = ChunkLimits(
            rows=config.ctx_batch_size,
            chunk_sizes=config.chunk_sizes,
            largest_chunk=config.prefill_chunk_size,
            tokens=config.prompt_capacity,
            tokens_per_prompt=config.sequence_length,
            alignment=1,
            max_bypass=MAX_BYPASS,
            prefix_reuse=reuse,
        )
        self._arrivals = itertools.count()
        self._states: WeakKeyDictionary[VllmRequest, RequestState] = WeakKeyDictionary()

    def plan(
        self,
        requests: Sequence[VllmRequest],
        cached: Mapping[str, int],
        slots: SlotDraft,
        tokens: int,
        tokens_per_prompt: int,
        *,
        cuts: Mapping[str, int],
        decodes_first: bool,
    ) -> dict[str, int]:
        """How many tokens of which prompt the next step takes in; to be called once for each step.

        Args:
            requests: those with prompt tokens to compute, at least one, in vLLM's order. The first has a slot or finds one.
            cached: of those that have not begun, tokens that vLLM's prefix cache holds.
            slots: what slots hold, and which are free for those that have none.
            tokens, tokens_per_prompt: prompt tokens that the step has room for, and that one prompt may take of it.
            cuts: where in requests chunks are to end, beside those that `slots` tells; 0: nowhere.
            decodes_first: where no prompt would end in the step, or come to a cut, none gets a token of it, as often as one may be passed over.
        """
        states = [
            self._state(request, cached.get(request.request_id, 0), cuts.get(request.request_id, 0))
            for request in requests
        ]
        if self._by_priority:
            states.sort(key=lambda state: state.request.priority)
        limits = dataclasses.replace(
            self._limits, tokens=min(tokens, self._limits.tokens), tokens_per_prompt=tokens_per_prompt
        )
        plan = plan_chunks(states, slots, limits)
        ends = any(chunk.is_last or chunk.start + chunk.count == chunk.parts_at for chunk in plan.chunks)
        if decodes_first and states[0].bypassed < MAX_BYPASS and not ends:
            states[0].bypassed += 1
            return {}
        planned = {chunk.request_id: chunk.count for chunk in plan.chunks}
        parts = {chunk.request_id: chunk.parts_at for chunk in plan.chunks}
        for state in states:
            if state.request.request_id in planned:
                state.bypassed, state.parts_at = 0, parts[state.request.request_id]
        if plan.passed_over is not None:
            states[0].bypassed += 1
        return planned

    def _state(self, request: VllmRequest, cached: int, cut: int) -> RequestState:
        """A request as the planner sees it: what is cached of one that has not begun is no part of its prompt. One that was
        preempted has a longer prompt than before, as has a session."""
        state = self._states.get(request)
        begin = 0 if request.num_computed_tokens else cached
        if state is None or len(state.request.prompt_token_ids) != request.num_tokens - begin:
            bypassed = 0 if state is None else state.bypassed
            state = self._states[request] = RequestState(self._prompt(request, begin), next(self._arrivals), 1)
            state.bypassed = bypassed
        state.computed = request.num_computed_tokens
        # A request has a slot as soon as something of it is computed; vLLM knows which.
        state.slot = 0 if request.num_computed_tokens else None
        if cut or state.slot is None:
            state.parts_at = max(0, cut - begin)
        return state

    def _prompt(self, request: VllmRequest, begin: int) -> Request:
        if request.skip_reading_prefix_cache:
            tokens = np.full(request.num_tokens, _NO_TOKEN, np.int32)
        else:
            tokens = np.asarray(request.all_token_ids[begin:], np.int32)
        priority = request.priority if self._by_priority else 0
        return Request(request_id=request.request_id, prompt_token_ids=tokens, priority=priority)
