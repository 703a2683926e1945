# SPDX-License-Identifier: Apache-2.0
"""The choice of who samples a request's tokens: the graphs, or vLLM's sampler from the logits that the graphs return."""

from __future__ import annotations

import copy

from vllm.sampling_params import SamplingParams

from ..config import MOST_LOGPROBS, NeuronConfig
from ..step.spec import GREEDY
from ..step.spec import SamplingParams as OnDeviceParams


# Below it vLLM takes a temperature for 0.
GREEDY_TEMPERATURE = 1e-5
# The mode of vLLM's log-probabilities that graphs know: those before temperature, penalties and the like.
RAW_LOGPROBS = "raw_logprobs"


def check_request(params: SamplingParams, config: NeuronConfig) -> None:
    """Raise ValueError where the artifact cannot honour a request's parameters."""
    if params.prompt_logprobs is not None and not config.prompt_logits:
        raise ValueError(
            "prompt_logprobs needs the logits of all tokens of a prompt, and no graph of this artifact returns them; export it with "
            "--prompt-logits, or leave it out"
        )
    if getattr(params, "prompt_logprob_token_ids", None) is not None:
        raise ValueError("prompt_logprob_token_ids is not supported; ask for prompt_logprobs, or leave it out")
    if getattr(params, "watermarking", None):
        raise ValueError("watermarking is not supported by this runner; leave it out")
    reason = host_reason(params, config)
    if reason is not None and not config.returns_decode_logits:
        count = params.logprobs
        others = copy.copy(params)
        others.logprobs = None
        few = count is not None and 0 <= count <= MOST_LOGPROBS
        alone = few and host_reason(others, config) is None
        other = f", or for logprobs alone with --top-logprobs {count}" if alone else ""
        raise ValueError(f"{reason}, and this artifact returns no logits; export it with --output-logits{other}")


def host_reason(params: SamplingParams, config: NeuronConfig) -> str | None:
    """Return why the on-device sampler cannot choose a request's tokens, or None where it can."""
    if not config.on_device_sampling:
        return "the artifact was exported without on-device sampling"
    count, most = params.logprobs, config.top_logprobs
    wants_more = count is not None and (most is None or not 0 <= count <= most)  # -1 is all of them
    asked = {
        "logprobs": wants_more or getattr(params, "logprob_token_ids", None) is not None,
        "structured outputs": params.structured_outputs is not None,
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "repetition_penalty": params.repetition_penalty != 1,
        # vLLM takes the nucleus of what min_p leaves, the graphs the other way round.
        "min_p with top_p": params.min_p != 0 and params.top_p < 1,
        "min_tokens": params.min_tokens > 0,
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": bool(params.allowed_token_ids),
        "bad_words": bool(params.bad_words),
        "thinking_token_budget": getattr(params, "thinking_token_budget", None) is not None,
        "extra_args": bool(params.extra_args),
    }
    for name, wanted in asked.items():
        if wanted:
            return f"{name} needs logits on the host"
    return None


def on_device_params(params: SamplingParams) -> OnDeviceParams:
    """Return a request's row of the graphs' sampling parameters, where `host_reason` is None."""
    if params.temperature < GREEDY_TEMPERATURE:
        return GREEDY
    return OnDeviceParams(max(params.top_k, 0), params.top_p, params.temperature, params.min_p).in_float32()
