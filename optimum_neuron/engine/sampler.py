# SPDX-License-Identifier: Apache-2.0
"""The choice of one request's tokens: by the graphs, or by logits processors on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..config import NeuronConfig
from ..core import Request
from ..runtime.step_rows import UniformStream
from ..step.spec import GREEDY, SamplingParams


# Scores are float32: another temperature would be 0 or infinite to them.
_COLDEST, _HOTTEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def check_sampling(request: Request, config: NeuronConfig) -> None:
    """Raise ValueError where neither the graphs nor the host could choose a request's tokens."""
    top_k, top_p, temperature, min_p = request.sampling
    who = f"request {request.request_id!r}"
    # Written so that NaN is refused too.
    in_range = temperature == 0 or _COLDEST <= temperature <= _HOTTEST
    if not (in_range and 0 <= top_p <= 1 and 0 <= min_p <= 1 and (top_k == 0 or top_k >= 1)):
        raise ValueError(
            f"{who} has top_k={top_k}, top_p={top_p}, temperature={temperature}, min_p={min_p}; top_k must be at least 1, or 0 "
            f"for none, top_p and min_p between 0 and 1, temperature 0 or between {_COLDEST:.3} and {_HOTTEST:.3}"
        )
    if request.seed is not None and (not isinstance(request.seed, int) or request.seed < 0):
        raise ValueError(f"{who} has seed={request.seed!r}; give a whole number of at least 0, or leave it out")
    reason = _host_reason(request, config)
    if request.logprobs and reason is None and config.top_logprobs is None:
        raise ValueError(
            f"{who} has logprobs=True, and this artifact returns none; export it with --top-logprobs (top_logprobs=0)"
        )
    if reason is not None and not config.returns_decode_logits:
        raise ValueError(
            f"{who} {reason}, and this artifact returns no logits; export it with --output-logits (output_logits=True)"
        )


def _host_reason(request: Request, config: NeuronConfig) -> str | None:
    """Return why the host chooses the request's tokens, or None where the graphs do."""
    if request.processors is not None:
        return "brings logits processors, which run on the host"
    if not config.on_device_sampling:
        return "needs the host, since the artifact was exported without on-device sampling"
    return None


class RequestSampler:
    """The choice of one request's tokens.

    Attributes:
        slot: its row of the cache, from its first chunk on.
        began: `time.perf_counter()` when the step of that began; 0 before.
        on_host: whether `choose_token` chooses, instead of the graphs.
        sampling: how the graphs choose.
        uniforms: its random numbers, where the graphs draw with them.
        logprobs: whether the graphs return the log-probabilities of its tokens.
        logprob: log-probability of the last token that the host chose, among what the processors left; where the request asks for
            log-probabilities, among all tokens.
        top: then, the most likely tokens with theirs.
    """

    def __init__(self, request: Request, config: NeuronConfig, vocab_size: int, seed: np.random.SeedSequence) -> None:
        self.request = request
        self.slot, self.began = -1, 0.0
        self.on_host = _host_reason(request, config) is not None
        self.logprobs = request.logprobs and not self.on_host
        # Where nothing is drawn, top_k and top_p have no meaning, and need not be numbers that a graph can take.
        draws = not self.on_host and request.sampling.temperature > 0
        self.sampling = request.sampling.in_float32() if draws else GREEDY
        self.uniforms = UniformStream(seed) if draws else None
        self.logprob: float | None = None
        self.top: tuple[tuple[int, float], ...] = ()
        self._top_count = config.top_logprobs if request.logprobs else None
        if self.on_host:
            import torch  # only where the host chooses: it takes seconds

            from ..runtime.token_choice import HostChoice

            generator = torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
            processors, do_sample = request.processors, request.do_sample
            if processors is None:
                processors, do_sample = _make_warpers(request.sampling, vocab_size), request.sampling.temperature > 0
            self._choice = HostChoice(processors, do_sample, scores=[], generator=generator)

    def choose_token(self, output_token_ids: Sequence[int], logits: np.ndarray) -> int:
        """Return the next token from `logits [vocab]` float32, by the processors.

        Raises:
            ValueError: the processors left no score per token, or none to choose by. What a processor raises comes out, too.
        """
        import torch

        tokens = np.concatenate([self.request.prompt_token_ids, np.asarray(output_token_ids, dtype=np.int32)])
        (token,) = self._choice.choose_tokens(torch.from_numpy(tokens).long()[None], logits[None])
        assert self._choice.scores is not None
        scores = self._choice.scores.pop()
        best = float(scores.max())  # NaN where one is
        if not best > -np.inf:
            raise ValueError(f"scores have {best} as the best; they need a number above -inf, and no NaN")
        logprobs = torch.log_softmax(scores[0] if self._top_count is None else torch.from_numpy(logits), dim=-1)
        self.logprob = float(logprobs[token])
        if self._top_count:
            top = logprobs.topk(self._top_count)
            self.top = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return token


def _make_warpers(sampling: SamplingParams, vocab_size: int) -> Any:
    """Return the warpers that do what the on-device sampler does, in its order."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers = LogitsProcessorList()
    if sampling.temperature > 0:
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if 0 < sampling.top_k < vocab_size:
            warpers.append(TopKLogitsWarper(int(sampling.top_k)))
        if sampling.top_p < 1:
            warpers.append(TopPLogitsWarper(float(sampling.top_p)))
        if sampling.min_p > 0:
            warpers.append(MinPLogitsWarper(float(sampling.min_p)))
    return warpers
