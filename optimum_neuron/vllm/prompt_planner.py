# SPDX-License-Identifier: Apache-2.0
"""The prompts that a step of vLLM's scheduler takes in, and how much of each, by the rules of `Engine`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
from vllm.v1.request import Request as VllmRequest

from ..config import NeuronConfig
from ..core import Request
from ..engine.block_draft import BlockDraft
from ..engine.planner import PromptLimits, plan_prompts
from ..engine.request import RequestState


# Steps in a row in which short prompts or decodes alone may go before a long prompt: it takes every third step at least.
MAX_BYPASS = 2
# In place of each token of a prompt that declines to reuse any: no slot holds it.
_NO_TOKEN = np.iinfo(np.int32).max


class PromptPlanner:
    """Gives vLLM's requests to the planner, and remembers which were passed over.

    Args:
        by_priority: whether vLLM's policy is by priority; otherwise all are equal.
        reuse: whether prompts reuse what slots hold, rather than vLLM's blocks.
    """

    def __init__(self, config: NeuronConfig, *, by_priority: bool, reuse: bool) -> None:
        self._by_priority = by_priority
        self._limits = PromptLimits(
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
            requests: those with prompt tokens to compute, at least one, in vLLM's order. The first has a slot or finds one.
            cached: of those that have not begun, tokens that vLLM's prefix cache holds.
            slots: what slots hold, and which are free for those that have none.
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
        limits = dataclasses.replace(
            self._limits, tokens=min(tokens, self._limits.tokens), tokens_per_prompt=tokens_per_prompt
        )
        plan = plan_prompts(states, slots, limits)
        ends = any(piece.is_last or piece.end == piece.cut for piece in plan.pieces)
        if decodes_first and states[0].bypassed < MAX_BYPASS and not ends:
            states[0].bypassed += 1
            return {}
        planned = {piece.request_id: piece.count for piece in plan.pieces}
        found = {piece.request_id: piece.cut for piece in plan.pieces}
        for state in states:
            if state.request.request_id in planned:
                state.bypassed, state.cut = 0, found[state.request.request_id]
        if plan.passed_over is not None:
            states[0].bypassed += 1
        return planned

    def _find_state(self, request: VllmRequest, cached: int, cut: int) -> RequestState:
        """Return a request as the planner sees it: cached tokens of one that has not begun are no part of its prompt.

        One that was preempted has a longer prompt than before, as has a session.
        """
        state = self._states.get(request)
        begin = 0 if request.num_computed_tokens else cached
        if state is None or len(state.request.prompt_token_ids) != request.num_tokens - begin:
            bypassed = 0 if state is None else state.bypassed
            state = self._states[request] = RequestState(self._make_prompt(request, begin), next(self._arrivals), 1)
            state.bypassed = bypassed
        state.computed = request.num_computed_tokens
        # A request has a row as soon as something of it is computed; vLLM knows which.
        state.slot = 0 if request.num_computed_tokens else None
        if cut or state.slot is None:
            state.cut = max(0, cut - begin)
        return state

    def _make_prompt(self, request: VllmRequest, begin: int) -> Request:
        if request.skip_reading_prefix_cache:
            tokens = np.full(request.num_tokens, _NO_TOKEN, np.int32)
        else:
            tokens = np.asarray(request.all_token_ids[begin:], np.int32)
        priority = request.priority if self._by_priority else 0
        return Request(request_id=request.request_id, prompt_token_ids=tokens, priority=priority)
