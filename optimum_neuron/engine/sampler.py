# SPDX-License-Identifier: Apache-2.0
"""The choice of one request's tokens: by the graphs, or by logits processors on the host."""

from __future__ import annotations

import time
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
    reason = None
    if request.processors is not None:
        reason = "brings logits processors, which run on the host"
    elif not config.on_device_sampling:
        reason = "needs the host, since the artifact was exported without on-device sampling"
    if request.logprobs and reason is None and config.top_logprobs is None:
        raise ValueError(
            f"{who} has logprobs=True, and this artifact returns none; export it with --top-logprobs (top_logprobs=0)"
        )
    if reason is not None and not config.returns_decode_logits:
        raise ValueError(
            f"{who} {reason}, and this artifact returns no logits; export it with --output-logits (output_logits=True)"
        )


class RequestSampler:
    """The choice of one request's tokens.

    Attributes:
        slot: its row of the cache, from its first chunk on.
        arrived, began: `time.perf_counter()` when it came, and when the step of its first chunk began; 0 before.
        has_token: whether it has a token.
        on_host: whether `choose_token` chooses, instead of the graphs.
        sampling: how the graphs choose.
        uniforms: its random numbers, where the graphs draw with them.
        logprobs: whether the graphs return the log-probabilities of its tokens.
        logprob, top: log-probability of the last token that the host chose, among what the processors left; where the request asks
            for log-probabilities, among all tokens, and the most likely ones with theirs.
    """

    def __init__(self, request: Request, config: NeuronConfig, vocab_size: int, seed: np.random.SeedSequence) -> None:
        self.request = request
        self.slot, self.arrived, self.began = -1, time.perf_counter(), 0.0
        self.has_token = False
        self.on_host = request.processors is not None or not config.on_device_sampling
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
        """Return the next token from `logits [vocab]` float32, by the processors; ValueError where they leave none to choose."""
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
    import transformers

    warpers = transformers.LogitsProcessorList()
    if sampling.temperature > 0:
        warpers.append(transformers.TemperatureLogitsWarper(float(sampling.temperature)))
        if 0 < sampling.top_k < vocab_size:
            warpers.append(transformers.TopKLogitsWarper(int(sampling.top_k)))
        if sampling.top_p < 1:
            warpers.append(transformers.TopPLogitsWarper(float(sampling.top_p)))
        if sampling.min_p > 0:
            warpers.append(transformers.MinPLogitsWarper(float(sampling.min_p)))
    return warpers
