# SPDX-License-Identifier: Apache-2.0
"""What was measured of a model in one precision, and what is read from it: medians, ratios, shares of the machine's limits."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from ..limits import Limits
from .models import Shape
from .names import OURS
from .schedule import Case


LOAD, FIRST_TOKEN, PEAK = "load, s", "first token from a cold start, s", "peak memory, MB"
CONVERSION = "export or conversion, s"


@dataclass
class Group:
    """A model in one precision.

    Attributes:
        values: by figure and peer, one of each round.
        floors: of a case's figure, the least seconds that the machine could take for one prompt or step.
        agreement: share of greedy tokens that are the reference's up to the first other one, by peer.
        reasons: by peer, why figures are missing.
        versions: by peer.
    """

    model: str
    precision: str
    cases: list[Case]
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
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

    def set_floors(self, limits: Limits, shape: Shape) -> None:
        """Whatever takes longer bounds a case: reading, or computing; no type computes faster than bfloat16 here."""
        rate = limits.products["float32" if self.precision == "float32" else "bfloat16"]
        for case in self.cases:
            if case.kind == "prefill":
                needs = shape.prefill(case.prompt, self.precision)
            elif case.kind == "decode":
                needs = shape.decode(case.rows, case.prompt + case.new_tokens / 2, self.precision)
            else:
                continue
            self.floors[case.figure] = max(needs.bytes / limits.read, needs.operations / rate)

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
        """The least time that the machine could take over the time that the peer took; None where that is not told."""
        case = next((case for case in self.cases if case.figure == figure and figure in self.floors), None)
        median = self.median(figure, peer)
        if case is None or median is None:
            return None
        seconds = median / 1e3 if case.kind == "decode" else case.prompt / median
        return self.floors[figure] / seconds

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
