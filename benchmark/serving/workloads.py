# SPDX-License-Identifier: Apache-2.0
"""Workloads of requests that come at certain moments, and what is read from the times of their tokens. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


LONG = "long"


@dataclass
class Trace:
    """What happened while a workload ran; all times are seconds of one clock.

    Attributes:
        submitted: when each request was handed over.
        tokens: when each token of a request came.
        steps: kind, start and end of each step, where the system tells.
        counters: the system's own statistics.
        rows: requests that can generate at once, where the system has such a limit.
        taken_tokens, filled_tokens: of the cache, that requests have and that hold something, both summed over steps, where the system
            tells.
    """

    submitted: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, list[float]] = field(default_factory=dict)
    steps: list[tuple[str, float, float]] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)
    rows: int = 1
    taken_tokens: int = 0
    filled_tokens: int = 0

    def count(self, request_id: str) -> int:
        """Tokens of a request so far."""
        return len(self.tokens.get(request_id, ()))

    def ttft(self, request_id: str) -> float:
        """Seconds from handing a request over to its first token."""
        return self.tokens[request_id][0] - self.submitted[request_id]

    def throughput(self) -> float:
        """New tokens per second, from the first request to the last token: all systems have the same work."""
        end = max(times[-1] for times in self.tokens.values())
        return sum(map(len, self.tokens.values())) / (end - min(self.submitted.values()))

    def queued(self) -> tuple[float, float]:
        """From when as many requests have begun as there are rows to when the last one is handed over: all rows are asked for.

        Raises:
            ValueError: the last one is handed over before.
        """
        begun = sorted(times[0] for times in self.tokens.values())
        start, stop = begun[min(self.rows, len(begun)) - 1], max(self.submitted.values())
        if start >= stop:
            raise ValueError(
                f"the last of {len(self.submitted)} requests came before {self.rows} rows were taken: have more requests"
            )
        return start, stop

    def while_queued(self) -> dict[str, float]:
        """New tokens per second in that time, and requests that were generating, on average."""
        start, stop = self.queued()
        spans = [min(times[-1], stop) - max(times[0], start) for times in self.tokens.values()]
        tokens = sum(start < time <= stop for times in self.tokens.values() for time in times)
        return {
            "tok_s": tokens / (stop - start),
            "generating": sum(span for span in spans if span > 0) / (stop - start),
        }

    def cache(self) -> dict[str, float]:
        """How often requests gave their part of the cache back, and the share of it that held nothing, in percent."""
        found = {"preempted": float(self.counters["preemptions"])} if "preemptions" in self.counters else {}
        if self.taken_tokens:
            found["unfilled_percent"] = 100 * (1 - self.filled_tokens / self.taken_tokens)
        return found

    def gaps(self, names: Sequence[str], start: float, stop: float) -> list[float]:
        """Seconds between two tokens of a request, for all gaps that overlap the window."""
        return [
            later - earlier
            for name in names
            for earlier, later in zip(self.tokens[name], self.tokens[name][1:], strict=False)
            if earlier < stop and later > start
        ]


@dataclass(frozen=True)
class Job:
    """A request, and when it comes: `due(trace, now)` is asked before each step."""

    name: str
    prompt: np.ndarray
    new_tokens: int
    due: Callable[[Trace, float], bool]


class PromptSource:
    """Random prompts that share no prefix, so that no reuse can help."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def draw(self, length: int) -> np.ndarray:
        return self._random.integers(0, self._vocab_size, length).astype(np.int32)

    def around(self, mean: int) -> int:
        """A length within a fifth of `mean`."""
        return int(self._random.uniform(0.8 * mean, 1.2 * mean))

    def tailed(self, median: int, sigma: float) -> int:
        """A length of a lognormal distribution: most are short, a few many times as long."""
        return max(2, int(self._random.lognormal(np.log(median), sigma)))


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
        jobs = [Job(name, prompts.draw(self.short_prompt), new_tokens, _at_once) for name in self.names]

        def all_are_warm(trace: Trace, now: float) -> bool:
            return all(trace.count(name) >= self.warm_tokens for name in self.names)

        return [*jobs, Job(LONG, prompts.draw(self.long_prompt), self.long_new_tokens, all_are_warm)]

    def results(self, trace: Trace) -> dict[str, float]:
        """Times in ms: the pauses of decoding requests before and while the long prompt is taken in, and its TTFT."""
        came, first = trace.submitted[LONG], trace.tokens[LONG][0]
        started = max(trace.tokens[name][0] for name in self.names)
        before = np.array(trace.gaps(self.names, started, came)) * 1e3
        inside = np.array(trace.gaps(self.names, came, first)) * 1e3
        return {
            "ttft_ms": trace.ttft(LONG) * 1e3,
            "decode_itl_ms": float(np.median(before)),
            **_pauses(inside),
            "tok_s": trace.throughput(),
        }


class _Answered:
    """Counts requests that have all of their tokens, once for each moment.

    Args:
        tokens: by name of a request.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._moment: tuple[int, float] | None = None
        self._count = 0

    def count(self, trace: Trace, now: float) -> int:
        if self._moment != (id(trace), now):
            self._moment = id(trace), now
            self._count = sum(len(times) == self._tokens.get(name) for name, times in trace.tokens.items())
        return self._count


@dataclass(frozen=True)
class Users:
    """Users who each send the next request when their last one is answered, out of one list of requests.

    Attributes:
        tail: sigma of lognormal distributions of both lengths, whose medians are `prompt` and `new_tokens`; 0: within a fifth of them.
        longest: tokens of a request, at most; 0: whatever they come to.
    """

    users: int
    requests: int
    prompt: int
    new_tokens: int
    tail: float = 0.0
    longest: int = 0

    def _lengths(self, prompts: PromptSource) -> tuple[int, int]:
        if not self.tail:
            return prompts.around(self.prompt), prompts.around(self.new_tokens)
        prompt, new_tokens = (prompts.tailed(median, self.tail) for median in (self.prompt, self.new_tokens))
        if self.longest:
            prompt = min(prompt, self.longest - 2)
            new_tokens = min(new_tokens, self.longest - prompt)
        return prompt, new_tokens

    def jobs(self, prompts: PromptSource) -> list[Job]:
        lengths = [self._lengths(prompts) for _ in range(self.requests)]

        answered = _Answered({str(number): new_tokens for number, (_, new_tokens) in enumerate(lengths)})

        def due(number: int) -> Callable[[Trace, float], bool]:
            """Whoever of the users is free sends the next one: none of them has sent all of his before the others have."""
            return lambda trace, now: number < self.users + answered.count(trace, now)

        return [
            Job(str(number), prompts.draw(prompt), new_tokens, due(number))
            for number, (prompt, new_tokens) in enumerate(lengths)
        ]

    def results(self, trace: Trace) -> dict[str, float]:
        """Times in ms over all requests; of lengths with a tail, as long as all rows are asked for: a long one may end alone."""
        ttft = np.array([trace.ttft(name) for name in trace.tokens]) * 1e3
        first = {"ttft_ms": float(ttft.mean()), "ttft_p99_ms": float(np.quantile(ttft, 0.99))}
        if not self.tail:
            gaps = np.concatenate([np.diff(times) for times in trace.tokens.values()]) * 1e3
            return {**first, **_pauses(gaps), "tok_s": trace.throughput()}
        gaps = np.array(trace.gaps(list(trace.tokens), *trace.queued())) * 1e3
        return {**first, **_pauses(gaps), **trace.while_queued(), **trace.cache()}


@dataclass(frozen=True)
class Behind:
    """Short prompts that come one after another behind a long one, while some requests decode."""

    stall: Stall
    shorts: int
    interval: float

    def jobs(self, prompts: PromptSource) -> list[Job]:
        def due(number: int) -> Callable[[Trace, float], bool]:
            wait = (number + 1) * self.interval
            return lambda trace, now: LONG in trace.submitted and now >= trace.submitted[LONG] + wait

        shorts = [Job(f"short{number}", prompts.draw(24), 2, due(number)) for number in range(self.shorts)]
        return [*self.stall.jobs(prompts), *shorts]

    def results(self, trace: Trace) -> dict[str, float]:
        """Times in ms."""
        shorts = np.array([trace.ttft(f"short{number}") for number in range(self.shorts)]) * 1e3
        return {
            "short_ttft_p50_ms": float(np.median(shorts)),
            "short_ttft_max_ms": float(shorts.max()),
            "ttft_ms": trace.ttft(LONG) * 1e3,
            "itl_max_ms": max(trace.gaps(self.stall.names, trace.submitted[LONG], trace.tokens[LONG][0])) * 1e3,
        }


Workload = Stall | Users | Behind


def _at_once(trace: Trace, now: float) -> bool:
    return True


def _pauses(gaps: np.ndarray) -> dict[str, float]:
    return {
        "itl_p50_ms": float(np.median(gaps)),
        "itl_p99_ms": float(np.quantile(gaps, 0.99)),
        "itl_max_ms": float(gaps.max()),
    }
