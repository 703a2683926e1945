# SPDX-License-Identifier: Apache-2.0
"""Steps as vLLM's scheduler puts them, made by hand, and a worker that follows its books."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from slot_model import MODEL, VOCAB, SlotModel, slot_runner
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from optimum_neuron.core import Prefix
from optimum_neuron.vllm.model_runner import ModelRunner
from optimum_neuron.vllm.prefixes import StepPlan


GREEDY = {"temperature": 0.0}


def random_prompt(length: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, VOCAB, length).tolist()
    return tokens


def new_request(
    name: str, prompt: Sequence[int], slot: int, computed: int = 0, prefill: Sequence[int] | None = None, **params: Any
) -> NewRequestData:
    """A request that vLLM schedules for the first time; `prefill` is what runners of version 2 also get."""
    return NewRequestData(
        req_id=name,
        prompt_token_ids=list(prompt),
        mm_features=[],
        sampling_params=SamplingParams(**params or GREEDY),
        pooling_params=None,
        block_ids=([slot + 1],),
        num_computed_tokens=computed,
        lora_request=None,
        prefill_token_ids=None if prefill is None else list(prefill),
    )


def step_output(
    counts: dict[str, int],
    *,
    new: Sequence[NewRequestData] = (),
    computed: dict[str, int] | None = None,
    resumed: dict[str, tuple[int, list[int]]] | None = None,
    finished: Sequence[str] = (),
    reuse: dict[str, tuple[int, int]] | None = None,
) -> SchedulerOutput:
    """One step.

    Args:
        counts: how many tokens of each request, in vLLM's order; those that are not `new` are sent as known ones.
        computed: tokens of the known ones that earlier steps computed.
        resumed: known ones that were preempted, with their new slot and all their tokens.
        reuse: what the connector plans: request to source slot and length.
    """
    computed, resumed = computed or {}, resumed or {}
    known = [name for name in counts if name not in {request.req_id for request in new}]
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = list(new)
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=known,
        resumed_req_ids=set(resumed),
        new_token_ids=[],
        all_token_ids={name: tokens for name, (_, tokens) in resumed.items()},
        new_block_ids=[([resumed[name][0] + 1],) if name in resumed else None for name in known],
        num_computed_tokens=[computed.get(name, 0) for name in known],
        num_output_tokens=[0] * len(known),
    )
    output.num_scheduled_tokens = dict(counts)
    output.total_num_scheduled_tokens = sum(counts.values())
    output.finished_req_ids = set(finished)
    output.kv_connector_metadata = StepPlan(
        prefixes={name: Prefix(length, source=slot) for name, (slot, length) in (reuse or {}).items()}
    )
    return output


class Driver:
    """A worker over a SlotModel, told what to do step by step; it keeps vLLM's count of computed tokens.

    Attributes:
        tokens: what each request got so far.
        prompt_tables: log-probabilities of prompts, as they were handed out.
    """

    def __init__(self, vllm_config: VllmConfig, prompts: dict[str, list[int]], **sizes: int | bool) -> None:
        self.graphs = slot_runner(**sizes)
        assert isinstance(self.graphs.executable, SlotModel)
        self.model: SlotModel = self.graphs.executable
        self.runner = ModelRunner(self.graphs, MODEL, vllm_config)
        self.prompts = prompts
        self.params: dict[str, dict[str, Any]] = {}
        self.computed: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {name: [] for name in prompts}
        self.prompt_tables: dict[str, Any] = {}

    def step(
        self,
        counts: dict[str, int],
        start: dict[str, int] | None = None,
        resume: dict[str, int] | None = None,
        finished: Sequence[str] = (),
        reuse: dict[str, tuple[int, int]] | None = None,
        version: int = 1,
    ) -> list[str]:
        """Runs a step; returns which graphs ran, as `SlotModel.runs` has it.

        Args:
            start, resume: slots of the requests that are new, or were preempted.
            version: of the model runner, for which vLLM writes a preempted request in one way or another.
        """
        start, resume, reuse = start or {}, resume or {}, reuse or {}
        for name in (*start, *resume):
            self.computed[name] = reuse.get(name, (0, 0))[1]
        everything = {name: self.prompts[name] + self.tokens[name] for name in resume}
        as_new = {**start, **resume} if version == 2 else start
        before = len(self.model.runs)
        output = self.run(
            step_output(
                counts,
                new=[self._new(name, slot, everything.get(name), version) for name, slot in as_new.items()],
                computed=self.computed,
                resumed={name: (resume[name], everything[name]) for name in resume if name not in as_new},
                finished=finished,
                reuse=reuse,
            )
        )
        for name, count in counts.items():
            self.computed[name] += count
        assert output.req_ids == list(counts)
        return self.model.runs[before:]

    def _new(self, name: str, slot: int, everything: list[int] | None, version: int) -> NewRequestData:
        prefill = None if version == 1 else everything or self.prompts[name]
        return new_request(
            name, self.prompts[name], slot, self.computed[name], prefill, **self.params.get(name, GREEDY)
        )

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs a step and keeps its tokens."""
        self.runner.execute_step(output)
        result = self.runner.sample_step(None)()
        for name, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True):
            self.tokens[name] += tokens
        assert not self.prompt_tables.keys() & result.prompt_logprobs_dict.keys()
        self.prompt_tables |= result.prompt_logprobs_dict
        return result
