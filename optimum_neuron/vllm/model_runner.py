# SPDX-License-Identifier: Apache-2.0
"""Translates a step of vLLM's scheduler into runs of the graphs, and their results into vLLM's output.

vLLM decides which request advances by how much, and which blocks of the cache it has. A request with tokens that are not in its
row, of its prompt or of what a preemption left to rebuild, takes a piece of any length; any other takes its one token as a decode row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, LogprobsTensors, ModelRunnerOutput

from ..arrays import to_torch
from ..core import PromptPiece
from ..runtime.logprobs import TokenLogprobs
from ..runtime.prefill import cut_pieces, find_scoring_graph
from ..runtime.runner import GraphRunner
from ..runtime.step_rows import StepRows
from ..step.model_spec import ModelSpec
from .host_sampler import HostSampler, join_logprobs
from .prefixes import StepPlan
from .requests import NO_ROW, CacheRows, RequestTable, RowState
from .sampling import RAW_LOGPROBS


@dataclass
class _ComputedStep:
    """A step that the graphs run or have run, before its tokens are given to vLLM.

    Attributes:
        on_device: requests that got a token from the graphs, with it and its log-probabilities.
        on_host: requests that get one from vLLM's sampler, with their logits `[vocab]`.
        started: each waits for a run to end, and gives its requests' tokens.
        prompts: by request, log-probabilities of prompts that are all in the cache now.
    """

    scheduler_output: Any
    on_device: list[tuple[RowState, int, TokenLogprobs | None]] = field(default_factory=list)
    on_host: list[tuple[RowState, Tensor]] = field(default_factory=list)
    started: list[Callable[[], list[tuple[RowState, int | np.ndarray]]]] = field(default_factory=list)
    prompts: dict[str, LogprobsTensors | None] = field(default_factory=dict)


class ModelRunner:
    """Runs vLLM's steps in the graphs, while it has any: `is_loaded`. Only one thread at a time may use it."""

    def __init__(self, runner: GraphRunner, model: ModelSpec, vllm_config: VllmConfig) -> None:
        self._sizes = runner.config
        self._sampler = HostSampler(vllm_config, self._sizes.batch_size, model.vocab_size)
        is_raw = vllm_config.model_config.logprobs_mode == RAW_LOGPROBS
        self._requests = RequestTable(
            self._sizes if is_raw else replace(self._sizes, top_logprobs=None),
            vllm_config.model_config.seed,
            all_on_host=bool(self._sampler.processors),
            mode=vllm_config.model_config.logprobs_mode,
            vocab_size=model.vocab_size,
        )
        self._computed: _ComputedStep | None = None
        self.load_runner(runner)

    def load_runner(self, runner: GraphRunner) -> None:
        self.runner = runner
        self._rows: StepRows[RowState] = StepRows(runner)
        self._cache = CacheRows(self._rows, runner)
        self.is_loaded = True

    def unload_runner(self) -> None:
        """Let go of the graphs and of all rows, while no request runs. Requests stay, and with them their random numbers."""
        if self.is_loaded:
            self.is_loaded = False
            for state in self._requests.values():
                state.slot = NO_ROW
            del self.runner, self._rows, self._cache

    def execute_step(self, scheduler_output: Any) -> None:
        """Run a step; `sample_step` then returns its tokens. Where the device runs ahead, it need not have ended."""
        self._follow_requests(scheduler_output)
        self._computed = _ComputedStep(scheduler_output)
        decodes, pieces = self._list_rows(scheduler_output)
        scored = [piece for piece in pieces if self._wants_scores(piece)]
        sizes = self._sizes.ctx_batch_size, self._sizes.prefill_chunk_size
        groups = list(cut_pieces((piece for piece in pieces if not self._wants_scores(piece)), *sizes))
        if decodes:
            self._run_graph(decodes, groups.pop(0) if groups and self.runner.family.has_mixed else ())
        for group in groups:
            self._run_graph((), group)
        for group in cut_pieces(scored, *sizes):
            self._run_graph((), group, scores=True)
        for request_id, place in _find_plan(scheduler_output).keep.items():
            self.runner.keep_state(self._requests[request_id].slot, place)

    def sample_step(self, grammar: Any | None) -> Callable[[], ModelRunnerOutput]:
        """Return what gives the tokens of the executed step; it waits for the step's end, so the next one may be executed before."""
        step, self._computed = self._computed, None
        if step is None or not step.scheduler_output.num_scheduled_tokens:
            return lambda: EMPTY_MODEL_RUNNER_OUTPUT
        tokens: dict[str, list[int]] = {}
        host_logprobs = self._sample_on_host(step, grammar, tokens) if step.on_host else None
        return partial(_make_output, step, tokens, host_logprobs)

    def _sample_on_host(
        self, step: _ComputedStep, grammar: Any | None, tokens: dict[str, list[int]]
    ) -> LogprobsLists | None:
        """Add the tokens; return log-probabilities in the order of `step.on_host`."""
        logits = torch.stack([row for _, row in step.on_host])
        requests = [state.host for state, _ in step.on_host if state.host is not None]
        order, chosen, logprobs = self._sampler.sample_tokens(requests, logits, step.scheduler_output, grammar)
        for request_id, token in zip(order, chosen, strict=True):
            self._rows.feed_token(self._requests[request_id].slot, token)
            tokens[request_id] = [token]
        if logprobs is None:
            return None
        places = [order.index(state.request_id) for state, _ in step.on_host]
        return LogprobsLists(
            logprobs.logprob_token_ids[places], logprobs.logprobs[places], logprobs.sampled_token_ranks[places]
        )

    def _follow_requests(self, scheduler_output: Any) -> None:
        for request_id in scheduler_output.finished_req_ids:
            ended = self._requests.pop(request_id, None)
            if ended is not None:  # it got here
                self._sampler.remove_request(request_id)
                self._cache.release_row(ended)
        for request_id in scheduler_output.preempted_req_ids or ():
            if request_id in self._requests:
                self._cache.release_row(self._requests[request_id])
        starting: dict[str, tuple[RowState, list[int], int]] = {}
        for new in scheduler_output.scheduled_new_reqs:
            self._sampler.remove_request(new.req_id)
            starting[new.req_id] = (self._requests.start_request(new), new.block_ids[0], new.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self._requests[request_id]
            if request_id in cached.resumed_req_ids:
                self._sampler.remove_request(request_id)
                state.restart_from(cached.all_token_ids[request_id])
                starting[request_id] = (state, blocks[0], computed)
            elif blocks is not None:
                self._cache.extend_row(state, blocks[0])
        plan = _find_plan(scheduler_output)
        # In the order of vLLM's decisions: a copy may take what an earlier one brought, and a later one takes its slot.
        for request_id in scheduler_output.num_scheduled_tokens:
            if request_id in starting:
                state, blocks, computed = starting[request_id]
                if request_id in plan.slots:
                    blocks = [plan.slots[request_id] + 1]
                self._cache.start_request(state, blocks, computed, plan.prefixes.get(request_id))
                self._check_length(state, computed)

    def _check_length(self, state: RowState, computed: int) -> None:
        if self.runner.lengths[state.slot] != computed:
            raise RuntimeError(
                f"row {state.slot} of request {state.request_id} holds {self.runner.lengths[state.slot]} tokens, and vLLM "
                f"counts {computed}; this is a fault of the plugin"
            )

    def _list_rows(self, scheduler_output: Any) -> tuple[list[RowState], list[PromptPiece]]:
        """Return the requests that decode, and the pieces of the others' prompts, in vLLM's order."""
        decodes: list[RowState] = []
        pieces: list[PromptPiece] = []
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._check_length(self._requests[request_id], computed)
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            state = self._requests[request_id]
            start, end = int(self.runner.lengths[state.slot]), len(state.prefill_token_ids)
            missing = end - start
            if not 1 <= count <= max(missing, 1):
                raise RuntimeError(
                    f"vLLM schedules {count} tokens of request {request_id}, which has {max(missing, 1)} to compute; this is "
                    f"a fault of the plugin"
                )
            if missing > 0:
                tokens = state.prefill_token_ids[start : start + count]
                is_last = start + count == end
                pieces.append(PromptPiece(state.slot, tokens, request_id=request_id, start=start, is_last=is_last))
            else:
                decodes.append(state)
        return decodes, pieces

    def _wants_scores(self, piece: PromptPiece) -> bool:
        scores = self._requests[piece.request_id].prompt_scores
        return scores is not None and piece.start < scores.last

    def _run_graph(self, decodes: Sequence[RowState], pieces: Sequence[PromptPiece], *, scores: bool = False) -> None:
        """Run one graph once, one that scores pieces where asked; keep what it gives to requests with prompts that are all in the cache."""
        assert self._computed is not None
        if not scores and self._rows.may_run_ahead(decodes, pieces):
            self._computed.started.append(self._rows.start_rows(decodes, pieces))
            self._end_prompts(pieces)
            return
        graph = find_scoring_graph(self.runner, pieces) if scores else None
        chosen = self._rows.run_rows(decodes, pieces, graph)
        for piece, logits in zip(pieces, self._rows.scored, strict=scores):
            prompt_scores = self._requests[piece.request_id].prompt_scores
            if prompt_scores is not None:
                prompt_scores.add_logits(piece.start, to_torch(logits))
        self._end_prompts(pieces)
        for state, choice in chosen:
            if isinstance(choice, np.ndarray):
                self._computed.on_host.append((state, to_torch(choice).clone()))  # the next run uses its memory again
            else:
                self._rows.feed_token(state.slot, choice)
                self._computed.on_device.append((state, choice, self._rows.logprobs.get(state.slot)))

    def _end_prompts(self, pieces: Sequence[PromptPiece]) -> None:
        assert self._computed is not None
        for piece in pieces:
            state = self._requests[piece.request_id]
            scores = state.prompt_scores
            if scores is not None and piece.end > scores.last:
                self._computed.prompts[state.request_id] = scores.table
                state.prompt_scores = None


def _find_plan(scheduler_output: Any) -> StepPlan:
    plan = scheduler_output.kv_connector_metadata
    return plan if isinstance(plan, StepPlan) else StepPlan()


def _make_output(
    step: _ComputedStep, tokens: dict[str, list[int]], host_logprobs: LogprobsLists | None
) -> ModelRunnerOutput:
    """Return a step's output, once the step has ended."""
    for wait in step.started:
        step.on_device += [(state, token, None) for state, token in wait() if not isinstance(token, np.ndarray)]
    tokens = tokens | {state.request_id: [token] for state, token, _ in step.on_device}
    ids = list(step.scheduler_output.num_scheduled_tokens)
    wanted = [(state.request_id, token, each) for state, token, each in step.on_device if each is not None]
    logprobs = join_logprobs(wanted, [state.request_id for state, _ in step.on_host], host_logprobs, ids)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[tokens.get(request_id, []) for request_id in ids],
        logprobs=logprobs,
        prompt_logprobs_dict=step.prompts,
    )
