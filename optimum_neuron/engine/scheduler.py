# SPDX-License-Identifier: Apache-2.0
"""Decides what each step does, and keeps the requests' progress. Knows nothing of tensors, models or devices.

`schedule` proposes a step and changes nothing; `commit` takes the tokens that the step produced. A caller has at most one step
between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from ..config import NeuronConfig
from ..core import PromptPiece, Request, RequestRow, Step
from ..runtime.lengths import check_length
from ..step.family import GraphFamily
from ..step.spec import GraphKind, GraphSpec, graph_specs
from .block_pool import MIN_REUSE
from .block_table import BlockDraft, BlockTable
from .events import TokenEvent
from .planner import PromptLimits, plan_prompts
from .policy import SchedulerOptions, StepCosts, next_kind, resolve_policy
from .queues import RequestQueues, RequestState


# Waiting prompts that a step looks at. More would find shorter ones to let pass, at a cost that every step pays.
WAITING_WINDOW = 64


class Scheduler:
    """Continuous batching over the rows of one artifact's cache.

    Args:
        family: the graphs, which choose that of each step; None: those that `config` describes.
        min_reuse: tokens that a common prefix must have to be reused.
        state_places: places for state that rows keep next to keys and values, without which they reuse nothing; None where they
            keep none.

    Attributes:
        policy: what `options.policy` stands for.
        queues: the requests that are not finished.
        cache: which request holds which row and blocks.

    Raises:
        ValueError: the artifact cannot do what the options ask.
    """

    def __init__(
        self,
        config: NeuronConfig,
        options: SchedulerOptions | None = None,
        family: GraphFamily | None = None,
        *,
        min_reuse: int = MIN_REUSE,
        state_places: int | None = None,
    ) -> None:
        self.options = options or SchedulerOptions()
        if state_places == 0:
            self.options = replace(self.options, prefix_reuse=False)
        self._config = config
        self._family = family or GraphFamily(graph_specs(config))
        self.policy = resolve_policy(self.options.policy, config.mixed_step)
        self._largest_step = config.step_capacity
        if self.options.max_step_tokens is not None:
            self._largest_step = self.options.max_step_tokens
        if self._largest_step <= config.batch_size:
            raise ValueError(
                f"max_step_tokens={self._largest_step} must exceed batch_size={config.batch_size}, or decoding leaves no "
                f"token for a prompt; raise max_step_tokens to {config.batch_size + 1} or more"
            )
        self.cache = BlockTable(config, min_reuse, state_places if self.options.prefix_reuse else None)
        # Then a decode needs nothing but its row: most steps have decodes alone, and are planned at once.
        self._holds_all = self.cache.has_slots and not self.cache.pool.keeps_state
        self._costs = StepCosts()
        self.queues = RequestQueues()
        self._after_prompts = False
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Return whether any request is not finished."""
        return bool(self.queues.live)

    def add_request(self, request: Request) -> None:
        """Queue a request; ValueError where it could never be served."""
        state = RequestState(request, self._arrivals, self.check_request(request))
        self._arrivals += 1
        self.queues.add_state(state)

    def check_request(self, request: Request) -> int:
        """Raise what `add_request` would raise and change nothing; return how many tokens the request gets at most."""
        config, who, prompt = self._config, f"request {request.request_id!r}", len(request.prompt_token_ids)
        if request.request_id in self.queues.live:
            raise ValueError(f"{who} is not finished; choose another id, or abort the first one")
        most = check_length(prompt, request.max_new_tokens, config, f"the prompt of {who}")
        capacity = config.prompt_capacity
        budget = self._largest_step - (config.batch_size - 1 if self.policy == "mixed" else 0)
        if request.atomic and prompt > capacity:
            raise ValueError(
                f"{who} is atomic with {prompt} prompt tokens, but one step takes in at most ctx_batch_size * prefill_chunk_size "
                f"= {config.ctx_batch_size} * {config.prefill_chunk_size} = {capacity}; export with a larger prefill_chunk_size"
            )
        if request.atomic and prompt > budget:
            raise ValueError(
                f"{who} is atomic with {prompt} prompt tokens, but max_step_tokens leaves {budget} for prompts while the other "
                f"slots decode; raise max_step_tokens by {prompt - budget}"
            )
        return most

    def abort_request(self, request_id: str) -> bool:
        """End a request in whatever state it is and free its row; return False where no such request is live.

        A step under way may still hold the request: `commit` drops its tokens.
        """
        state = self.queues.live.get(request_id)
        if state is None:
            return False
        self._finish_request(state)
        self.queues.refresh_decodes()
        return True

    def schedule(self) -> Step | None:
        """Return the next step, or None where no request is live. Changes nothing, so that two calls agree."""
        queues = self.queues
        decodes, context, prefilling = queues.decodes, queues.context, queues.prefilling
        if decodes and self._holds_all and not queues.waiting and not prefilling:
            return Step(self._family.select("token_generation", context), decodes, ())
        draft = BlockDraft(self.cache, chain(queues.running.values(), prefilling))
        if draft.preempted:
            gone = {each.arrival for each in draft.preempted}
            decodes = tuple(decode for decode in decodes if decode.arrival not in gone)
            running = (state for state in queues.running.values() if state.arrival not in gone)
            context = max((state.context for state in running), default=0)
            prefilling = [state for state in prefilling if state.arrival not in gone]
        step = self._plan_step(draft, prefilling, decodes, context)
        return None if step is None else draft.complete_step(step, queues.live)

    def _plan_step(
        self, draft: BlockDraft, prefilling: Sequence[RequestState], decodes: tuple[RequestRow, ...], context: int
    ) -> Step | None:
        kind = next_kind(
            self.policy,
            decodes=bool(decodes),
            prompts=bool(prefilling or (self.queues.waiting and draft.open_rows)),
            after_chunks=self._after_prompts,
            unfinished=bool(prefilling),
        )
        if kind is None:
            return None
        if kind != "token_generation":
            rows, seen = (decodes, context) if kind == "mixed" else ((), 1)
            candidates = self._list_candidates(prefilling, draft)
            pieces, passed_over = plan_prompts(candidates, draft, self._find_limits(kind, len(rows)))
            if pieces:
                return Step(self._select_graph(kind, rows, seen, pieces), rows, pieces, passed_over)
        # No prompt advances: all of them may wait for the blocks of requests that decode.
        return Step(self._select_graph("token_generation", decodes, context, ()), decodes, ())

    def _select_graph(
        self, kind: GraphKind, decodes: Sequence[RequestRow], context: int, pieces: Sequence[PromptPiece]
    ) -> GraphSpec:
        """Return the smallest graph of a step with decodes that see so many columns, or blocks where graphs read these in place."""
        counts = [piece.count for piece in pieces]
        seen = max([piece.end for piece in pieces], default=1)
        if not self._family.in_place:
            return self._family.select(kind, max(context, seen), counts)
        size, highest = self._config.block_length, -1
        for decode in decodes:
            used = -(-self.queues.running[decode.slot].cached // size)
            highest = max([highest, *self.cache.blocks[decode.slot][:used]])
        return self._family.select(kind, seen, counts, highest + 1)

    def _list_candidates(self, prefilling: Sequence[RequestState], draft: BlockDraft) -> Sequence[RequestState]:
        """Return prompts that this step could advance, in the order in which they are due."""
        if self.policy == "all_chunks":  # one prompt to its end, whatever arrives meanwhile
            return prefilling[:1] or self.queues.waiting[:1]
        waiting = self.queues.waiting[:WAITING_WINDOW] if draft.open_rows else []
        return sorted(
            (*prefilling, *waiting), key=lambda state: (state.request.priority, state.slot is None, state.arrival)
        )

    def _find_limits(self, kind: GraphKind, decodes: int) -> PromptLimits:
        options, config = self.options, self._config
        chunk_sizes = self._family.chunk_sizes(kind)
        largest = chunk_sizes[-1]
        if options.itl_target_ms is not None and self.queues.running:
            largest = self._costs.largest_within(options.itl_target_ms / 1000, chunk_sizes, kind)
        return PromptLimits(
            options=options,
            rows=config.ctx_batch_size,
            chunk_sizes=chunk_sizes,
            largest_chunk=largest,
            tokens=self._largest_step - decodes,
            tokens_per_prompt=options.long_prefill_token_threshold or config.sequence_length,
        )

    def commit(
        self, step: Step, decode_tokens: Sequence[int], piece_tokens: Sequence[int], seconds: float | None = None
    ) -> list[TokenEvent]:
        """Take what the step that `schedule` returned last produced, in `seconds`; return the tokens that callers get.

        Args:
            decode_tokens, piece_tokens: one for each of the step, in its order; those of unfinished prompts are ignored.

        Raises:
            ValueError: a token is missing or too many.
            RuntimeError: the step does not continue the present state: it was committed before, or is outdated.
        """
        if (len(decode_tokens), len(piece_tokens)) != (len(step.decodes), len(step.pieces)):
            raise ValueError(
                f"a step of {len(step.decodes)} decodes and {len(step.pieces)} prompt pieces got {len(decode_tokens)} and "
                f"{len(piece_tokens)} tokens; give one for each"
            )
        queues, cache = self.queues, self.cache
        states = queues.find_decoding(step.decodes)
        queues.check_pieces(step.pieces)
        if self.options.itl_target_ms is not None:
            self._costs.record_time(step.graph, seconds)
        self._after_prompts = bool(step.pieces)
        if step.passed_over and (state := queues.find_current(step.passed_over)):
            state.bypassed += 1
        for gone in step.preempted:
            if state := queues.find_current(gone):
                cache.release_row(gone.slot)
                queues.restart_state(state)
        cache.apply_step(step, queues.find_current)
        events, reuses = [], self.options.reuse_generated
        for state, decode, token_id in zip(states, step.decodes, decode_tokens, strict=True):
            if state:
                if reuses and not state.request.atomic:
                    cache.append_token(decode.slot, state.output_token_ids[-1])
                events.append(self._emit_token(state, int(token_id)))
        for piece, token_id in zip(step.pieces, piece_tokens, strict=True):
            if state := queues.find_current(piece):
                self._advance_prompt(state, piece)
                if piece.is_last:
                    events.append(self._emit_token(state, int(token_id)))
        queues.context += bool(step.decodes)
        queues.refresh_decodes()
        return events

    def _advance_prompt(self, state: RequestState, piece: PromptPiece) -> None:
        start = piece.start
        if piece.is_first:
            self.queues.start_prompt(state, piece.slot, piece.cut)
            self.cache.hold_row(piece.slot, state.request.request_id)
            start = 0
        if not state.request.atomic:  # else its rows depend on later tokens: no other prompt may reuse them
            self.cache.write_tokens(piece.slot, start, state.tokens[start : piece.end])
        state.computed, state.bypassed = piece.end, 0
        if piece.is_last:
            self.queues.start_decodes(state, piece.slot)

    def _emit_token(self, state: RequestState, token_id: int) -> TokenEvent:
        reason = state.append_token(token_id)
        if reason:
            self._finish_request(state)
        return TokenEvent(state.request.request_id, token_id, reason)

    def _finish_request(self, state: RequestState) -> None:
        if state.slot is not None:
            self.cache.release_row(state.slot)
        self.queues.finish_state(state)
