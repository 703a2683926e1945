# SPDX-License-Identifier: Apache-2.0
"""What was measured of a model in one precision, and what is read from it: medians, ratios, shares of the machine's limits."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..limits import Limits
from .models import Needs, Shape
from .names import OURS
from .schedule import Case


LOAD, FIRST_TOKEN, PEAK = "load, s", "first token from a cold start, s", "peak memory, MB"
CONVERSION = "export or conversion, s"


@dataclass
class Group:
    """A model in one precision.

    Attributes:
        values: by figure and peer, one of each round.
        reads: as `values` of decode, the rate at which memory was read right before each: others who use the machine take a share
            of it that changes from minute to minute.
        limits: of the whole run, once it is known.
        needs: of a case's figure, for one prompt or step.
        agreement: share of greedy tokens that are the reference's up to the first other one, by peer.
        reasons: by peer, why figures are missing.
        versions: by peer.
    """

    model: str
    precision: str
    cases: list[Case]
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    reads: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    limits: Limits | None = None
    needs: dict[str, Needs] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, figure: str, peer: str, value: float) -> None:
        self.values.setdefault(figure, {}).setdefault(peer, []).append(value)

    def explain(self, peer: str, reason: str) -> None:
        """Notes a reason once."""
        reasons = self.reasons.setdefault(peer, [])
        if reason not in reasons:
            reasons.append(reason)

    def add_read(self, figure: str, peer: str, rate: float) -> None:
        self.reads.setdefault(figure, {}).setdefault(peer, []).append(rate)

    def set_limits(self, limits: Limits, shape: Shape) -> None:
        self.limits = limits
        for case in self.cases:
            if case.kind == "prefill":
                self.needs[case.figure] = shape.prefill(case.prompt, self.precision)
            elif case.kind == "decode":
                context = case.prompt + case.new_tokens / 2
                self.needs[case.figure] = shape.decode(case.rows, context, self.precision)

    def figures(self) -> list[str]:
        """All figures that anybody has, cases first."""
        order = [*(case.figure for case in self.cases), FIRST_TOKEN, LOAD, CONVERSION, PEAK]
        return [figure for figure in order if figure in self.values]

    def median(self, figure: str, peer: str) -> float | None:
        values = self.values.get(figure, {}).get(peer)
        return statistics.median(values) if values else None

    def ratio(self, figure: str, peer: str) -> float | None:
        """This project against a peer: above 1, this project is faster, or takes less."""
        ours, theirs = self.median(figure, OURS), self.median(figure, peer)
        if not ours or not theirs:  # what took no time, such as a conversion, has no ratio
            return None
        return ours / theirs if figure.endswith("tok/s") else theirs / ours

    def share(self, figure: str, peer: str) -> float | None:
        """The least time that the machine could take over the time that the peer took, the median of rounds; None where that is not told.

        Whatever takes longer bounds a case: reading, at the rate right before it where that was measured, or computing; no type
        computes faster than bfloat16 here.
        """
        values = self.values.get(figure, {}).get(peer)
        if not values or figure not in self.needs or self.limits is None:
            return None
        case = next(case for case in self.cases if case.figure == figure)
        reads = self.reads.get(figure, {}).get(peer) or [self.limits.read] * len(values)
        return statistics.median(map(partial(self._share, case, self.limits), values, reads))

    def _share(self, case: Case, limits: Limits, value: float, read: float) -> float:
        needs = self.needs[case.figure]
        rate = limits.products["float32" if self.precision == "float32" else "bfloat16"]
        seconds = value / 1e3 if case.kind == "decode" else case.prompt / value
        return max(needs.bytes / read, needs.operations / rate) / seconds

    def to_dict(self) -> dict[str, Any]:
        figures = {
            figure: {
                peer: {
                    "median": self.median(figure, peer),
                    "min": min(values),
                    "max": max(values),
                    "ratio": self.ratio(figure, peer),
                    "share": self.share(figure, peer),
                }
                for peer, values in self.values[figure].items()
            }
            for figure in self.figures()
        }
        told = {name: getattr(self, name) for name in ("model", "precision", "agreement", "reasons", "versions")}
        return {**told, "figures": figures}


def agreed(reference: list[list[int]], tokens: list[list[int]]) -> float:
    """Share of tokens before the first that is another, over all rows: behind it, texts have nothing in common."""
    equal = sum(
        next((place for place, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))
        for first, second in zip(reference, tokens, strict=True)
    )
    return equal / sum(map(len, reference))
