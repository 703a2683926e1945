# SPDX-License-Identifier: Apache-2.0
"""What the tests of the engine share: requests that arrive, are aborted or fail, and an engine that serves them with checks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from helpers import VOCAB
from invariants import check_cache
from torch import Tensor
from transformers import LogitsProcessorList

from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.events import RequestFailedError, RequestFailure
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.spec import SamplingParams


SAMPLED = SamplingParams(top_k=40, top_p=0.95, temperature=1.5)


@dataclass
class Arrival:
    """A request, the step before which it arrives, the steps after which it is aborted, and the tokens after which it fails."""

    request: Request
    step: int = 0
    aborted_after: int | None = None
    fails_after: int | None = None


def serve(
    engine: Engine, requests: Iterable[Request | Arrival] = ()
) -> tuple[dict[str, list[int]], dict[str, RequestFailedError]]:
    """Run to the end, with the table of slots checked at each step: the tokens of each request, and the errors of those that failed."""
    arrivals = [each if isinstance(each, Arrival) else Arrival(each) for each in requests]
    tokens: dict[str, list[int]] = defaultdict(list)
    errors: dict[str, RequestFailedError] = {}
    last = max((arrival.step for arrival in arrivals), default=-1)
    step = 0
    while engine.has_work or step <= last:
        for arrival in arrivals:
            if arrival.step == step:
                engine.add_request(arrival.request)
            if arrival.aborted_after is not None and arrival.step + arrival.aborted_after == step:
                engine.abort_request(arrival.request.request_id)
        for event in engine.step():
            assert event.request_id not in errors
            if isinstance(event, RequestFailure):
                errors[event.request_id] = event.error
            else:
                tokens[event.request_id].append(event.token_id)
        check_cache(engine.scheduler.cache)
        step += 1
        assert step < 2000
    assert len(engine.scheduler.cache.free_rows) == engine.config.batch_size
    return tokens, errors


def serve_alone(runner: GraphRunner, request: Request) -> list[int]:
    """The tokens of a request with an engine of its own, which reuses nothing."""
    engine = Engine(runner, SchedulerOptions(policy="prefill_first", prefix_reuse=False), vocab_size=VOCAB)
    return serve(engine, [request])[0][request.request_id]


def raises(scores: Tensor) -> Tensor:
    raise ZeroDivisionError("evil")


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raises_what_cannot_be_told(scores: Tensor) -> Tensor:
    raise UnspeakableError


def out_of_range(scores: Tensor) -> Tensor:
    scores[:, VOCAB + 7] = 0.0
    return scores


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda scores: torch.full_like(scores, value)


# What a processor does to its scores, and what the request's error says.
EVILS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "raises": (raises, "ZeroDivisionError: evil"),
    "raises what has no words": (raises_what_cannot_be_told, "UnspeakableError"),
    "forces a token that does not exist": (out_of_range, "IndexError"),
    "leaves no token": (filled(-torch.inf), "-inf as the best"),
    "makes all scores NaN": (filled(torch.nan), "nan as the best"),
    "makes one score NaN": (lambda scores: scores.index_fill(1, torch.tensor([5]), torch.nan), "nan as the best"),
    "returns more tokens than there are": (lambda scores: torch.cat([scores, scores + 50], 1), r"returned \[1, 600\]"),
    "returns two rows": (lambda scores: scores.repeat(2, 1), r"returned \[2, 300\]"),
    "returns one dimension": (lambda scores: scores[0], r"returned \[300\]"),
    "returns nothing": (lambda scores: None, "returned NoneType"),
    "returns no scores": (lambda scores: scores[:, :0], r"returned \[1, 0\]"),
    "is no function": (None, "TypeError"),  # type: ignore[dict-item]
}


@dataclass
class Turns:
    """A processor that turns evil with the n-th token."""

    evil: Callable[[Tensor], Any] | None
    after: int
    calls: int = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self.calls += 1
        return scores if self.calls <= self.after else self.evil(scores)  # type: ignore[misc]


def evil_request(name: str, prompt: np.ndarray, kind: str, after: int = 0, *, do_sample: bool = False) -> Request:
    processors = LogitsProcessorList([Turns(EVILS[kind][0], after)])
    return Request(
        request_id=name, prompt_token_ids=prompt, max_new_tokens=12, processors=processors, do_sample=do_sample, seed=1
    )
