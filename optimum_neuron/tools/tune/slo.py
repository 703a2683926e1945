# SPDX-License-Identifier: Apache-2.0
"""Service level objectives: what `ttft=2s,itl=50ms` means, and how far answers are from it. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from math import nan

import numpy as np

from .answers import Answer, values_of


# Of which metrics there are limits, and what to change where one is missed.
REMEDIES = {
    "ttft": "more replicas, a larger chunk or more rows",
    "itl": "a smaller chunk or fewer rows",
    "e2e": "more replicas, or both limits of its parts",
}
DEFAULT_PERCENTILE = 99.0
_UNITS = {"ms": 1e-3, "s": 1.0}
_LIMIT = re.compile(r"([a-z0-9]+)(?:\.p(\d+(?:\.\d+)?))?=(\d+(?:\.\d+)?|\.\d+)(ms|s)")


@dataclass(frozen=True)
class Limit:
    """The most that a percentile of a metric may be.

    Attributes:
        metric: "ttft", from arrival to first token; "itl", between two tokens; "e2e", from arrival to last token.
        percentile: above 0, at most 100, over all requests; of "itl", over all pauses of all requests.
        seconds: above 0.
    """

    metric: str
    percentile: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.metric.upper()} p{self.percentile:g} of {told(self.seconds)}"

    def found(self, answers: Collection[Answer]) -> float:
        """What answers have, in seconds; 0 where nothing was measured, as of requests of one token there are no pauses."""
        values = values_of(answers, self.metric)
        return float(np.percentile(values, self.percentile)) if values.size else 0.0

    def attained(self, answer: Answer) -> bool:
        """Whether a request has it for itself: of "itl", at this percentile of its own pauses."""
        return self.found((answer,)) <= self.seconds


@dataclass(frozen=True)
class Slo:
    """Limits that all have to be met; none: everything meets them."""

    limits: tuple[Limit, ...]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From limits separated by commas: `metric[.pPERCENTILE]=NUMBER(s|ms)`.

        Raises:
            ValueError: one is malformed, or two are of the same percentile.
        """
        limits = list[Limit]()
        for part in text.split(","):
            limit = _parse(part.strip())
            if any((limit.metric, limit.percentile) == (other.metric, other.percentile) for other in limits):
                raise ValueError(f"--slo {text!r} limits {limit.metric} p{limit.percentile:g} twice; give one of them")
            limits.append(limit)
        return cls(tuple(limits))

    def used(self, answers: Collection[Answer]) -> dict[Limit, float]:
        """By limit, the share of it that answers take; above 1 it is missed."""
        return {limit: limit.found(answers) / limit.seconds for limit in self.limits}

    def attainment(self, answers: Collection[Answer]) -> float:
        """The share of requests that each keep all limits for themselves; NaN of none."""
        if not answers:
            return nan
        return sum(all(limit.attained(answer) for limit in self.limits) for answer in answers) / len(answers)


def _parse(part: str) -> Limit:
    found = _LIMIT.fullmatch(part)
    if found is None:
        raise ValueError(f"--slo has {part!r}, which is no limit; give limits as ttft=2s,itl=50ms or ttft.p90=800ms")
    metric, percentile, number, unit = found.groups()
    if metric not in REMEDIES:
        raise ValueError(f"--slo has {part!r}, and {metric!r} is no metric; choose one of {', '.join(REMEDIES)}")
    share = DEFAULT_PERCENTILE if percentile is None else float(percentile)
    if not 0 < share <= 100:
        raise ValueError(f"--slo has {part!r}, and p{share:g} is no percentile; give one above 0, up to 100")
    seconds = float(number) * _UNITS[unit]
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--slo has {part!r}, which nothing meets; give a time above 0")
    return Limit(metric, share, seconds)


def told(seconds: float) -> str:
    """A time for people, in three digits."""
    if seconds != seconds:
        return "-"
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
