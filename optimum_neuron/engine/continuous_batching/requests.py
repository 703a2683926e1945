# SPDX-License-Identifier: Apache-2.0
"""Between transformers' continuous-batching configs and outputs and the engine's requests and tokens."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, StopStringCriteria
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ...artifact.artifact import Artifact
from ...config import NeuronConfig
from ...core import FinishReason
from ...runtime.arguments import check_options, refuse_unsupported
from ...runtime.defaults import OF_GENERATE, processors_of, stop_strings
from ...runtime.lengths import most_new_tokens
from ...runtime.token_choice import OnDeviceChoice, choose_how
from ...step.spec import GREEDY, SamplingParams
from ..events import Event, RequestFailure
from ..plain_requests import RequestMaker
from ..policy import Policy, SchedulerOptions


logger = logging.getLogger(__name__)

# Fields of transformers' config that mean something here; the others size memory and CUDA graphs that do not exist.
_HONOURED = {"max_batch_tokens", "scheduler_type", "allow_block_sharing", "return_logprobs", "seed"}
_OF_LOGITS = (GREEDY, SamplingParams(temperature=1.0))
_POLICIES: dict[str, Policy] = {"fifo": "auto", "prefill_first": "prefill_first"}


class RequestModel(Protocol):
    """The part of a `NeuronModelForCausalLM` that makes its requests."""

    artifact: Artifact
    config: Any
    generation_config: GenerationConfig
    neuron_config: NeuronConfig

    def settled(self, given: GenerationConfig | None = None) -> GenerationConfig: ...
    def new_tokens(self, config: GenerationConfig, prompt: int, rows: int = 1) -> int | None: ...
    def own_tokenizer(self) -> Any: ...


class RequestFactory(RequestMaker):
    """Makes engine requests from transformers' configs: one way for all requests of a batch or a manager.

    Args:
        cuts_text: whether the caller ends texts at stop strings itself. Else requests end as in `generate`.

    Raises:
        ValueError: a config asks for what the engine or the artifact cannot do; nothing is ignored silently.
    """

    def __init__(
        self,
        model: RequestModel,
        generation_config: GenerationConfig | None,
        batching_config: ContinuousBatchingConfig | None,
        *,
        cuts_text: bool = False,
    ) -> None:
        given = copy.copy(generation_config)
        if isinstance(given, GenerationConfig):
            given.use_cache = None  # transformers serve says False: the manager's cache is not the model's
        check_options(given, model.generation_config, {})
        if not isinstance(batching_config, ContinuousBatchingConfig | None):
            kind = type(batching_config).__name__
            raise TypeError(f"continuous_batching_config is a {kind}; give a transformers ContinuousBatchingConfig")
        self.model = model
        self.config = model.settled(given)
        self.batching = batching_config or ContinuousBatchingConfig()
        for name in OF_GENERATE:
            asked = getattr(self.config, name, None)
            if asked and asked != getattr(model.generation_config, name, None):
                raise ValueError(
                    f"{name}={asked!r} is not supported by continuous batching; leave it out, or use generate()"
                )
        refuse_unsupported(self.config, model.artifact.model.vocab_size)
        self.stop_strings = stop_strings(self.config)
        checks = self.stop_strings and not cuts_text
        self._stops = StopStringCriteria(model.own_tokenizer(), list(self.stop_strings)) if checks else None
        plain = ContinuousBatchingConfig()
        names = [field.name for field in dataclasses.fields(plain) if field.name not in _HONOURED]
        if set_names := [name for name in names if getattr(self.batching, name) != getattr(plain, name)]:
            logger.warning("%s: no meaning for compiled graphs, which got their cache at export", ", ".join(set_names))
        eos = self.config.eos_token_id
        if eos is None:
            eos = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
        ids = [eos] if isinstance(eos, int) else list(eos or ())
        # One that cannot be chosen ends nothing: -1 is a custom for none, and configs of cut-down models name others.
        self.eos_token_ids = frozenset(token for token in ids if 0 <= token < model.artifact.model.vocab_size)
        self.make_request("", [0], None)  # what no request could have is refused before the first

    def make_options(self) -> SchedulerOptions:
        """Return the scheduler's options."""
        kind = self.batching.scheduler_type
        if kind not in _POLICIES:
            raise ValueError(f"scheduler_type={kind!r} is not known; choose one of {', '.join(_POLICIES)}")
        return SchedulerOptions(
            policy=_POLICIES[kind],
            max_step_tokens=self.batching.max_batch_tokens,
            prefix_reuse=self.batching.allow_block_sharing,
        )

    def new_tokens(self, prompt: int) -> int | None:
        return self.model.new_tokens(self.config, prompt)

    def choose_options(
        self,
        prompt: np.ndarray,
        max_new_tokens: int | None,
        eos_token_ids: frozenset[int],
        sampling: Mapping[str, Any],
    ) -> dict[str, Any]:
        model, sizes, config = self.model, self.model.neuron_config, copy.copy(self.config)
        if sampling:  # what generate() narrows on its own is for requests that say nothing
            config.top_k = model.generation_config.top_k
        for name, value in sampling.items():
            setattr(config, name, value)
        most = most_new_tokens(prompt.size, sizes)
        config.eos_token_id = sorted(eos_token_ids) or None
        # Some processors count up to where this request ends.
        config.max_length = prompt.size + (most if max_new_tokens is None else max_new_tokens)
        processors, do_sample = processors_of(model, config, prompt), bool(config.do_sample)
        choose = partial(choose_how, processors, sizes, do_sample=do_sample, keep_logits=False)
        keeps, is_returned = self.batching.return_logprobs, False
        if keeps and sizes.top_logprobs is not None:
            # Of scores, which the graphs return where these are the logits themselves.
            choice = choose(keep_scores=False)
            is_returned = isinstance(choice, OnDeviceChoice) and choice.sampling in _OF_LOGITS
        choice = choose(keep_scores=keeps and not is_returned)
        fields: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": do_sample}
        if isinstance(choice, OnDeviceChoice):
            fields["sampling"] = choice.sampling
        else:
            fields["processors"] = processors
            if do_sample:  # for the record
                top_p = min(config.top_p, 1.0)
                fields["sampling"] = SamplingParams(config.top_k or 0, top_p, config.temperature, config.min_p or 0.0)
        if self._stops is not None or config.max_time is not None:
            fields["ends"] = partial(_find_end, prompt, self._stops, config.max_time)
        return fields | ({"logprobs": True} if is_returned else {})


def _find_end(
    prompt: np.ndarray, stops: StopStringCriteria | None, longest: float | None, tokens: Sequence[int], seconds: float
) -> FinishReason | None:
    """Return why a text ends with its last token, by transformers' own criteria; None where it does not."""
    if stops is not None and bool(stops(torch.from_numpy(np.append(prompt, tokens).astype(np.int64))[None], None)):
        return "stop"
    return "length" if longest is not None and seconds > longest else None


class RequestOutcome:
    """A request's output as it grows, in transformers' form."""

    def __init__(self, request_id: str, prompt: Sequence[int], *, timed: bool, logprobs: bool) -> None:
        self.prompt, self._with_logprobs = prompt, logprobs
        timestamps: list[float] | None = [] if timed else None
        prompt = prompt.tolist() if isinstance(prompt, Tensor | np.ndarray) else prompt
        ids = list(prompt) if isinstance(prompt, Iterable) else []  # the request refuses any other
        self.output = GenerationOutput(request_id=request_id, prompt_ids=ids, timestamps=timestamps)

    def add_event(self, event: Event) -> bool:
        """Take a token, or why there will be none; return whether the request ended with it."""
        if isinstance(event, RequestFailure):
            logger.error("%s", event.error)
            self.end_failed(str(event.error))
            return True
        now, output = time.perf_counter(), self.output
        if not output.generated_tokens:
            output.status, output.lifespan = RequestStatus.DECODING, (now, -1)
        output.generated_tokens.append(event.token_id)
        if event.logprob is not None and self._with_logprobs:
            output.logprobs.append(event.logprob)
        if output.timestamps is not None:
            output.timestamps.append(now)
        if event.finish_reason is not None:
            output.status, output.lifespan = RequestStatus.FINISHED, (output.lifespan[0], now)
        return event.finish_reason is not None

    def end_failed(self, reason: str) -> None:
        """End with an error."""
        self.output.error, self.output.status = reason, RequestStatus.FAILED
        self.output.lifespan = (self.output.lifespan[0], time.perf_counter())
