# SPDX-License-Identifier: Apache-2.0
"""When the tokens of requests came, and what follows from it. Knows nothing of who served them: an engine, or a simulation."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from math import nan
from typing import Any

import numpy as np


PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "itl", "e2e", "queue")


@dataclass(slots=True)
class Answer:
    """One request; all times are seconds of one clock.

    Attributes:
        arrival: when it was sent.
        begun: when its first step began; NaN before.
        times: when each of its tokens came.
    """

    arrival: float
    begun: float = nan
    times: array[float] = field(default_factory=lambda: array("d"))

    @property
    def ttft(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.times[0] - self.arrival

    @property
    def gaps(self) -> np.ndarray:
        """Return the seconds between two tokens, `[tokens - 1]`."""
        return np.diff(np.asarray(self.times))

    def values(self, metric: str) -> np.ndarray:
        """What it adds to a metric, one of METRICS, in seconds; nothing where it got no token yet."""
        if metric == "itl":
            return self.gaps
        if metric == "queue":
            return np.array([] if np.isnan(self.begun) else [self.begun - self.arrival])
        if not self.times:
            return np.array([])
        return np.array([self.ttft if metric == "ttft" else self.times[-1] - self.arrival])


def values_of(answers: Collection[Answer], metric: str) -> np.ndarray:
    """A metric of all requests, in seconds."""
    return np.concatenate([np.array([]), *(answer.values(metric) for answer in answers)])


@dataclass(frozen=True)
class Figures:
    """What users got.

    Attributes:
        times: by metric and percentile, seconds; NaN where no request has a value.
        tok_s, req_s: tokens and requests per second, from the first arrival to the last token.
        requests: how many.
    """

    times: dict[str, dict[int, float]]
    tok_s: float
    req_s: float
    requests: int

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Figures:
        """Of requests that were all answered."""
        times = {}
        for metric in METRICS:
            values = values_of(answers, metric)
            found = np.percentile(values, PERCENTILES) if values.size else np.full(len(PERCENTILES), nan)
            times[metric] = dict(zip(PERCENTILES, found.tolist(), strict=True))
        seconds = max(answer.times[-1] for answer in answers) - min(answer.arrival for answer in answers)
        tokens = sum(len(answer.times) for answer in answers)
        return cls(times, tokens / seconds, len(answers) / seconds, len(answers))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
