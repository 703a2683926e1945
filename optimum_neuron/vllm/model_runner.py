# SPDX-License-Identifier: Apache-2.0
"""Translates a step of vLLM's scheduler into runs of the graphs, and their results into vLLM's output.

vLLM decides which request advances by how much, and which blocks of the cache it has. A request whose prompt, or what a
preemption left to rebuild, is not all in its row takes a chunk, whatever its length; any other takes its one token as a decode row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, LogprobsTensors, ModelRunnerOutput

from ..runtime.prompt_logits import scoring_graph
from ..runtime.runner import GraphRunner
from ..runtime.step_rows import PromptPart, StepRows
from ..step.family import rows_needed
from ..step.model_spec import ModelSpec
from ..step.sampling.logprobs import Logprobs
from .host_sampler import HostSampler
from .logprobs import join_logprobs
from .requests import RequestTable, SlotRequest
from .rows import cache_rows
from .sampling import RAW_LOGPROBS
from .step_plan import StepPlan


@dataclass
class _Computed:
    """A step that the graphs have run, or were told to, and whose tokens are not handed out yet.

    Attributes:
        on_device: requests that got a token from the graphs, with it and what the graphs tell of it.
        on_host: requests that get one from vLLM's sampler, with their logits `[vocab]`.
        started: what waits for runs that have not ended, and gives their requests' tokens.
        prompts: by request, log-probabilities of prompts that are all in the cache now.
    """

    scheduler_output: Any
    on_device: list[tuple[SlotRequest, int, Logprobs | None]] = field(default_factory=list)
    on_host: list[tuple[SlotRequest, Tensor]] = field(default_factory=list)
    started: list[Callable[[], list[tuple[SlotRequest, int | Tensor]]]] = field(default_factory=list)
    prompts: dict[str, LogprobsTensors | None] = field(default_factory=dict)


class ModelRunner:
    """Not to be used by several threads at once.

    Args:
        runner: the graphs and slots.
        model: the sizes of the model.

    Attributes:
        is_loaded: whether there are graphs to run.
    """

    def __init__(self, runner: GraphRunner, model: ModelSpec, vllm_config: VllmConfig) -> None:
        self._sizes = runner.config
        self._sampler = HostSampler(vllm_config, self._sizes.batch_size, model.vocab_size)
        told = vllm_config.model_config.logprobs_mode == RAW_LOGPROBS
        self._requests = RequestTable(
            self._sizes if told else replace(self._sizes, top_logprobs=None),
            vllm_config.model_config.seed,
            all_on_host=bool(self._sampler.processors),
            mode=vllm_config.model_config.logprobs_mode,
            vocab_size=model.vocab_size,
        )
        self._computed: _Computed | None = None
        self.load(runner)

    def load(self, runner: GraphRunner) -> None:
        """Take loaded graphs, all rows of which are free."""
        self.runner = runner
        self._rows: StepRows[SlotRequest] = StepRows(runner)
        self._cache = cache_rows(self._rows, runner)
        self.is_loaded = True

    def unload(self) -> None:
        """Let go of the graphs and of all rows, while no request runs. Requests stay, and with them their random numbers."""
        if self.is_loaded:
            self.is_loaded = False
            self._requests.leave_rows()
            del self.runner, self._rows, self._cache

    def execute(self, scheduler_output: Any) -> None:
        """Runs a step; `sample` then hands out its tokens. Where the device runs ahead, it need not have ended.

        Raises:
            RuntimeError: a row does not hold what vLLM takes it to.
        """
        self._update(scheduler_output)
        self._computed = _Computed(scheduler_output)
        decodes, chunks = self._rows_of(scheduler_output)
        scored = [each for each in chunks if self._scores(each[0])]
        groups = list(self._group([each for each in chunks if not self._scores(each[0])]))
        together = self.runner.family.has_mixed and decodes and groups
        if decodes:
            self._run(decodes, groups.pop(0) if together else ())
        for group in groups:
            self._run((), group)
        for group in self._group(scored):
            self._run((), group, scores=True)
        for request_id, place in _plan(scheduler_output).keep.items():
            self.runner.keep_state(self._requests[request_id].slot, place)

    def sample(self, grammar: Any | None) -> Callable[[], ModelRunnerOutput]:
        """What gives the tokens of the step that `execute` ran; it waits for the step's end, so that the next one may be executed before.

        Args:
            grammar: vLLM's bit masks for requests with structured output, or None.
        """
        step, self._computed = self._computed, None
        if step is None or not step.scheduler_output.num_scheduled_tokens:
            return lambda: EMPTY_MODEL_RUNNER_OUTPUT
        tokens: dict[str, list[int]] = {}
        of_host = self._sample_on_host(step, grammar, tokens) if step.on_host else None
        return lambda: self._output(step, tokens, of_host)

    @staticmethod
    def _output(step: _Computed, tokens: dict[str, list[int]], of_host: LogprobsLists | None) -> ModelRunnerOutput:
        for wait in step.started:
            step.on_device += [(state, token, None) for state, token in wait() if not isinstance(token, Tensor)]
        tokens = tokens | {state.request_id: [token] for state, token, _ in step.on_device}
        ids = list(step.scheduler_output.num_scheduled_tokens)
        logprobs = join_logprobs(step.on_device, [state for state, _ in step.on_host], of_host, ids)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[tokens.get(request_id, []) for request_id in ids],
            logprobs=logprobs,
            prompt_logprobs_dict=step.prompts,
        )

    def _sample_on_host(
        self, step: _Computed, grammar: Any | None, tokens: dict[str, list[int]]
    ) -> LogprobsLists | None:
        """Adds the tokens; the logprobs are in the order of `step.on_host`."""
        logits = torch.stack([row for _, row in step.on_host])
        requests = [state.host for state, _ in step.on_host if state.host is not None]
        order, chosen, logprobs = self._sampler.sample(requests, logits, step.scheduler_output, grammar)
        for request_id, token in zip(order, chosen, strict=True):
            self._rows.feed(self._requests[request_id].slot, token)
            tokens[request_id] = [token]
        if logprobs is None:
            return None
        places = [order.index(state.request_id) for state, _ in step.on_host]
        return LogprobsLists(
            logprobs.logprob_token_ids[places], logprobs.logprobs[places], logprobs.sampled_token_ranks[places]
        )

    def _update(self, scheduler_output: Any) -> None:
        """Follows what became of the requests, and makes the rows of those that start ready."""
        self._release(scheduler_output)
        starting: dict[str, tuple[SlotRequest, list[int], int]] = {}
        for new in scheduler_output.scheduled_new_reqs:
            self._sampler.remove(new.req_id)
            starting[new.req_id] = (self._requests.start(new), new.block_ids[0], new.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self._requests[request_id]
            if request_id in cached.resumed_req_ids:
                self._sampler.remove(request_id)
                state.restart(cached.all_token_ids[request_id])
                starting[request_id] = (state, blocks[0], computed)
            elif blocks is not None:
                self._cache.extend(state, blocks[0])
        plan = _plan(scheduler_output)
        # In the order of vLLM's decisions: a copy may take what an earlier one brought, and a later one takes its slot.
        for request_id in scheduler_output.num_scheduled_tokens:
            if request_id in starting:
                state, blocks, computed = starting[request_id]
                if request_id in plan.slots:
                    blocks = [plan.slots[request_id] + 1]
                self._cache.start(state, blocks, computed, plan.reuse.get(request_id), plan.restore.get(request_id))
                self._check_length(state, computed)

    def _release(self, scheduler_output: Any) -> None:
        for request_id in scheduler_output.finished_req_ids:
            ended = self._requests.finish(request_id)
            if ended is not None:
                self._sampler.remove(request_id)
                self._cache.release(ended)
        for request_id in scheduler_output.preempted_req_ids or ():
            preempted = self._requests.get(request_id)
            if preempted is not None:
                self._cache.release(preempted)

    def _check_length(self, state: SlotRequest, computed: int) -> None:
        if self.runner.lengths[state.slot] != computed:
            raise RuntimeError(
                f"row {state.slot} of request {state.request_id} holds {self.runner.lengths[state.slot]} tokens, and vLLM "
                f"counts {computed}; this is a fault of the plugin"
            )

    def _rows_of(self, scheduler_output: Any) -> tuple[list[SlotRequest], list[tuple[SlotRequest, int]]]:
        """The requests that decode, and those that take a chunk with its length, in vLLM's order."""
        decodes: list[SlotRequest] = []
        chunks: list[tuple[SlotRequest, int]] = []
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._check_length(self._requests[request_id], computed)
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            state = self._requests[request_id]
            missing = len(state.prefill_token_ids) - int(self.runner.lengths[state.slot])
            if not 1 <= count <= max(missing, 1):
                raise RuntimeError(
                    f"vLLM schedules {count} tokens of request {request_id}, which has {max(missing, 1)} to compute; this is "
                    f"a fault of the plugin"
                )
            if missing > 0:
                chunks.append((state, count))
            else:
                decodes.append(state)
        return decodes, chunks

    def _group(self, chunks: Iterable[tuple[SlotRequest, int]]) -> Iterable[list[tuple[SlotRequest, int]]]:
        """Cuts chunks so that each group fits one run of a graph: all together, unless the step is larger than that."""
        size, rows = self._sizes.prefill_chunk_size, self._sizes.ctx_batch_size
        group: list[tuple[SlotRequest, int]] = []
        free = rows
        for state, count in chunks:
            while count:
                if not free:
                    yield group
                    group, free = [], rows
                part = min(count, free * size)
                group.append((state, part))
                free -= rows_needed([part], size)
                count -= part
        if group:
            yield group

    def _scores(self, state: SlotRequest) -> bool:
        """Whether somebody reads logits of all tokens of its next chunk."""
        return state.prompt_scores is not None and state.prompt_scores.wants(int(self.runner.lengths[state.slot]))

    def _run(
        self, decodes: Sequence[SlotRequest], group: Sequence[tuple[SlotRequest, int]], *, scores: bool = False
    ) -> None:
        """One run of one graph; keeps what it gave to requests whose slots are now up to date.

        Args:
            scores: the graph is one that returns the logits of all tokens of the group.
        """
        assert self._computed is not None
        parts, starts = [], []
        for state, count in group:
            start = int(self.runner.lengths[state.slot])
            end = start + count
            starts.append(start)
            parts.append(PromptPart(state, state.prefill_token_ids[start:end], end == len(state.prefill_token_ids)))
        if not scores and self._rows.may_run_ahead(decodes, parts):
            self._computed.started.append(self._rows.run_ahead(decodes, parts))
            self._end_prompts(parts)
            return
        graph = scoring_graph(self.runner, [(state.slot, count) for state, count in group]) if scores else None
        chosen = self._rows.run(decodes, parts, graph)
        for part, start, logits in zip(parts, starts, self._rows.scored, strict=scores):
            if part.request.prompt_scores is not None:
                part.request.prompt_scores.add(start, logits)
        self._end_prompts(parts)
        for state, choice in chosen:
            if isinstance(choice, Tensor):
                self._computed.on_host.append((state, choice.clone()))  # the next run uses its memory again
            else:
                self._rows.feed(state.slot, choice)
                self._computed.on_device.append((state, choice, self._rows.told.get(state.slot)))

    def _end_prompts(self, parts: Sequence[PromptPart[SlotRequest]]) -> None:
        assert self._computed is not None
        for state in (part.request for part in parts):
            scores = state.prompt_scores
            if scores is not None and scores.ends_before(int(self.runner.lengths[state.slot])):
                self._computed.prompts[state.request_id] = scores.table
                state.prompt_scores = None


def _plan(scheduler_output: Any) -> StepPlan:
    """What the scheduler's process plans beside the step; where it plans nothing, that."""
    plan = scheduler_output.kv_connector_metadata
    return plan if isinstance(plan, StepPlan) else StepPlan()
