# SPDX-License-Identifier: Apache-2.0
"""Times of the tokens of requests, and their summary. Knows nothing of the server: an engine, or a simulation."""

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

    def metric_values(self, metric: str) -> np.ndarray:
        """Return its values of one of METRICS, in seconds: several pauses for "itl", none where it has no token yet."""
        if metric == "itl":
            return np.diff(np.asarray(self.times))
        begun, times = self.begun, self.times
        ends = {"ttft": times[:1], "e2e": times[-1:], "queue": [] if np.isnan(begun) else [begun]}
        return np.asarray(ends[metric]) - self.arrival


def join_values(answers: Collection[Answer], metric: str) -> np.ndarray:
    """Return a metric's values of all requests, in seconds."""
    return np.concatenate([np.array([]), *(answer.metric_values(metric) for answer in answers)])


@dataclass(frozen=True)
class Figures:
    """Latencies and throughput that users got.

    Attributes:
        times: seconds by metric and percentile; NaN where no request has a value.
        tok_s, req_s: tokens and requests per second, from the first arrival to the last token.
        requests: number of requests.
    """

    times: dict[str, dict[int, float]]
    tok_s: float
    req_s: float
    requests: int

    @classmethod
    def from_answers(cls, answers: Sequence[Answer]) -> Figures:
        """Summarize requests that were all answered."""
        times = {}
        for metric in METRICS:
            values = join_values(answers, metric)
            found = np.percentile(values, PERCENTILES) if values.size else np.full(len(PERCENTILES), nan)
            times[metric] = dict(zip(PERCENTILES, found.tolist(), strict=True))
        seconds = max(answer.times[-1] for answer in answers) - min(answer.arrival for answer in answers)
        tokens = sum(len(answer.times) for answer in answers)
        return cls(times, tokens / seconds, len(answers) / seconds, len(answers))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON."""
        return asdict(self)
