# SPDX-License-Identifier: Apache-2.0
"""Times of the tokens of requests, their summary, and limits of them as `ttft=2s,itl=50ms`. Needs no torch."""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import nan

import numpy as np


PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "itl", "e2e", "queue")
# Metrics that have limits, and the change that helps where one is missed.
REMEDIES = {
    "ttft": "more replicas, a larger chunk or more rows",
    "itl": "a smaller chunk or fewer rows",
    "e2e": "more replicas, or both limits of its parts",
}
_UNITS = {"ms": 1e-3, "s": 1.0}
_LIMIT = re.compile(r"([a-z0-9]+)(?:\.p(\d+(?:\.\d+)?))?=(\d+(?:\.\d+)?|\.\d+)(ms|s)")


@dataclass(slots=True)
class Answer:
    """One request: when it was sent, its first step began (NaN before), and each token came, in seconds of one clock."""

    arrival: float
    begun: float = nan
    times: array[float] = field(default_factory=lambda: array("d"))

    def metric_values(self, metric: str) -> np.ndarray:
        """Return its values of one of METRICS, in seconds: several pauses for "itl", none where it has no token yet."""
        if metric == "itl":
            return np.diff(np.asarray(self.times))
        begun, times = self.begun, self.times
        ends = {"ttft": times[:1], "e2e": times[-1:], "queue": [] if np.isnan(begun) else [begun]}
        return np.asarray(ends[metric]) - self.arrival


def join_values(answers: Collection[Answer], metric: str) -> np.ndarray:
    return np.concatenate([np.array([]), *(answer.metric_values(metric) for answer in answers)])


@dataclass(frozen=True)
class Figures:
    """Latencies and throughput that users got; rates are from the first arrival to the last token."""

    times: dict[str, dict[int, float]]  # seconds by metric and percentile; NaN where no request has a value
    tok_s: float
    req_s: float
    requests: int

    @classmethod
    def from_answers(cls, answers: Sequence[Answer]) -> Figures:
        times = {}
        for metric in METRICS:
            values = join_values(answers, metric)
            found = np.percentile(values, PERCENTILES) if values.size else np.full(len(PERCENTILES), nan)
            times[metric] = dict(zip(PERCENTILES, found.tolist(), strict=True))
        seconds = max(answer.times[-1] for answer in answers) - min(answer.arrival for answer in answers)
        tokens = sum(len(answer.times) for answer in answers)
        return cls(times, tokens / seconds, len(answers) / seconds, len(answers))


@dataclass(frozen=True)
class Limit:
    """The most that a percentile of a metric may be."""

    metric: str  # "ttft", from arrival to first token; "itl", between two tokens; "e2e", from arrival to last token
    percentile: float  # above 0, at most 100, over all requests; for "itl" over all pauses of all requests
    seconds: float  # above 0

    def __str__(self) -> str:
        return f"{self.metric.upper()} p{self.percentile:g} of {time_text(self.seconds)}"

    def share_used(self, answers: Collection[Answer]) -> float:
        """Return the share that answers take; above 1 it is missed, and 0 without values, as requests of one token have no pause."""
        values = join_values(answers, self.metric)
        return float(np.percentile(values, self.percentile)) / self.seconds if values.size else 0.0


@dataclass(frozen=True)
class Slo:
    """Limits that all have to be met; without limits everything meets them."""

    limits: tuple[Limit, ...]

    @classmethod
    def parse_limits(cls, text: str) -> Slo:
        """Parse limits `metric[.pPERCENTILE]=NUMBER(s|ms)` with commas; raise ValueError where one is malformed, or given twice."""
        limits = list[Limit]()
        for part in text.split(","):
            limit = _parse_limit(part.strip())
            if any((limit.metric, limit.percentile) == (other.metric, other.percentile) for other in limits):
                raise ValueError(f"--slo {text!r} limits {limit.metric} p{limit.percentile:g} twice; give one of them")
            limits.append(limit)
        return cls(tuple(limits))

    def shares_used(self, answers: Collection[Answer]) -> dict[Limit, float]:
        return {limit: limit.share_used(answers) for limit in self.limits}

    def attainment(self, answers: Collection[Answer]) -> float:
        """Return the share of requests that each keep all limits for themselves."""
        return sum(all(limit.share_used((each,)) <= 1 for limit in self.limits) for each in answers) / len(answers)


def _parse_limit(part: str) -> Limit:
    found = _LIMIT.fullmatch(part)
    if found is None:
        raise ValueError(f"--slo has {part!r}, which is no limit; give limits as ttft=2s,itl=50ms or ttft.p90=800ms")
    metric, percentile, number, unit = found.groups()
    if metric not in REMEDIES:
        raise ValueError(f"--slo has {part!r}, and {metric!r} is no metric; choose one of {', '.join(REMEDIES)}")
    share = 99.0 if percentile is None else float(percentile)
    if not 0 < share <= 100:
        raise ValueError(f"--slo has {part!r}, and p{share:g} is no percentile; give one above 0, up to 100")
    seconds = float(number) * _UNITS[unit]
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--slo has {part!r}, which nothing meets; give a time above 0")
    return Limit(metric, share, seconds)


def time_text(seconds: float) -> str:
    """Return a time for people, in three digits."""
    if seconds != seconds:
        return "-"
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
