# SPDX-License-Identifier: Apache-2.0
"""Workloads of requests that come at certain moments, and what is read from the times of their tokens. Runs nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..systems import PromptSource


LONG = "long"


@dataclass
class Trace:
    """What happened while a workload ran; all times are seconds of one clock.

    Attributes:
        submitted: when each request was handed over.
        tokens: when each token of a request came.
        steps: kind and seconds of each step, where the system reports them.
        counters: the system's own statistics.
    """

    submitted: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, list[float]] = field(default_factory=dict)
    steps: list[tuple[str, float]] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)

    def take_due(self, waiting: list[Job]) -> list[Job]:
        """Remove the jobs that come now, and note when."""
        due = [job for job in waiting if job.due(self)]
        for job in due:
            waiting.remove(job)
            self.submitted[job.name] = time.perf_counter()
        return due

    def count(self, request_id: str) -> int:
        """Return the number of a request's tokens so far."""
        return len(self.tokens.get(request_id, ()))

    def ttft_ms(self, request_id: str) -> float:
        """Return the time from handing a request over to its first token."""
        return 1e3 * (self.tokens[request_id][0] - self.submitted[request_id])

    def throughput(self) -> float:
        """Return new tokens per second, from the first request to the last token: all systems have the same work."""
        end = max(times[-1] for times in self.tokens.values())
        return sum(map(len, self.tokens.values())) / (end - min(self.submitted.values()))

    def gaps_ms(self, names: Sequence[str], start: float, stop: float) -> list[float]:
        """Return the times between two tokens of a request, for all gaps that overlap the window."""
        return [
            1e3 * (later - earlier)
            for name in names
            for earlier, later in zip(self.tokens[name], self.tokens[name][1:], strict=False)
            if earlier < stop and later > start
        ]


@dataclass(frozen=True)
class Job:
    """A request, and when it comes: `due` is asked before each step."""

    name: str
    prompt: np.ndarray
    new_tokens: int
    due: Callable[[Trace], bool] = lambda trace: True


@dataclass(frozen=True)
class Stall:
    """Some requests decode, then one long prompt comes.

    Attributes:
        decodes: requests that decode.
        warm_tokens: tokens that each of them has when the long prompt comes.
        after_tokens: tokens that each of them gets beyond those.
    """

    decodes: int
    short_prompt: int
    long_prompt: int
    warm_tokens: int
    after_tokens: int
    long_new_tokens: int

    @property
    def names(self) -> list[str]:
        return [f"decode{number}" for number in range(self.decodes)]

    def jobs(self, prompts: PromptSource) -> list[Job]:
        new_tokens = self.warm_tokens + self.after_tokens
        jobs = [Job(name, _drawn(prompts, self.short_prompt), new_tokens) for name in self.names]

        def all_are_warm(trace: Trace) -> bool:
            return all(trace.count(name) >= self.warm_tokens for name in self.names)

        return [*jobs, Job(LONG, _drawn(prompts, self.long_prompt), self.long_new_tokens, all_are_warm)]

    def results(self, trace: Trace) -> dict[str, float]:
        """Return the pauses of decoding requests before and while the long prompt is taken in, its TTFT, and the throughput."""
        came, first = trace.submitted[LONG], trace.tokens[LONG][0]
        started = max(trace.tokens[name][0] for name in self.names)
        return {
            "ttft_ms": trace.ttft_ms(LONG),
            "decode_itl_ms": float(np.median(trace.gaps_ms(self.names, started, came))),
            **_pauses(trace.gaps_ms(self.names, came, first)),
            "tok_s": trace.throughput(),
        }


@dataclass(frozen=True)
class Users:
    """Users who each send the next request of one list when their last one is answered; lengths are within a fifth of the means."""

    users: int
    requests: int
    prompt: int
    new_tokens: int

    def jobs(self, prompts: PromptSource) -> list[Job]:
        random = np.random.default_rng(0)
        prompt, new_tokens = (
            (random.uniform(0.8, 1.2, self.requests) * mean).astype(int).tolist()
            for mean in (self.prompt, self.new_tokens)
        )

        def due(number: int) -> Callable[[Trace], bool]:
            def is_due(trace: Trace) -> bool:
                answered = sum(len(times) == new_tokens[int(name)] for name, times in trace.tokens.items())
                return number < self.users + answered

            return is_due

        return [
            Job(str(number), _drawn(prompts, prompt[number]), new_tokens[number], due(number))
            for number in range(self.requests)
        ]

    def results(self, trace: Trace) -> dict[str, float]:
        """Return TTFT, pauses and throughput over all requests."""
        ttft = [trace.ttft_ms(name) for name in trace.tokens]
        gaps = trace.gaps_ms(list(trace.tokens), -np.inf, np.inf)
        first = {"ttft_ms": float(np.mean(ttft)), "ttft_p99_ms": float(np.quantile(ttft, 0.99))}
        return {**first, **_pauses(gaps), "tok_s": trace.throughput()}


Workload = Stall | Users


def _drawn(prompts: PromptSource, length: int) -> np.ndarray:
    return prompts.draw(1, length)[0].numpy().astype(np.int32)


def _pauses(gaps: Sequence[float]) -> dict[str, float]:
    return {
        "itl_p50_ms": float(np.median(gaps)),
        "itl_p99_ms": float(np.quantile(gaps, 0.99)),
        "itl_max_ms": max(gaps),
    }
