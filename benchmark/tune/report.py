# SPDX-License-Identifier: Apache-2.0
"""Predicted beside served: tables, and numbers for JSON. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimum_neuron.tune.answers import Figures

from ..output import console, make_table


if TYPE_CHECKING:
    from optimum_neuron.tune.tune import Report

SHOWN = {"ttft": (50, 90), "itl": (50, 90), "e2e": (50, 90)}


@dataclass(frozen=True)
class Comparison:
    """One candidate, as it was predicted and as it was served."""

    name: str
    predicted: Figures
    served: Figures

    def rows(self) -> Iterator[tuple[str, float, float]]:
        """What is compared: its name with its unit, predicted and served."""
        for metric, percentiles in SHOWN.items():
            for percentile in percentiles:
                predicted, served = (each.times[metric][percentile] * 1e3 for each in (self.predicted, self.served))
                yield f"{metric.upper()} p{percentile}, ms", predicted, served
        yield "tok/s", self.predicted.tok_s, self.served.tok_s

    def to_dict(self) -> dict[str, Any]:
        """JSON-serializable."""
        compared = {
            name: {"predicted": predicted, "served": served, "ratio": served / predicted}
            for name, predicted, served in self.rows()
        }
        return {"candidate": self.name, "compared": compared}


def print_comparisons(report: Report, comparisons: Sequence[Comparison]) -> None:
    """A table for each candidate, then how far apart both are at most."""
    out = console()
    for sentence in report.about:
        out.print(sentence)
    for comparison in comparisons:
        table = make_table(comparison.name, ("figure",), ("predicted", "served", "served over predicted"))
        for name, predicted, served in comparison.rows():
            table.add_row(name, f"{predicted:,.1f}", f"{served:,.1f}", f"{served / predicted:.2f}")
        out.print(table)
    ratios = [served / predicted for comparison in comparisons for _, predicted, served in comparison.rows()]
    out.print(f"Served over predicted: {min(ratios):.2f} to {max(ratios):.2f}.")
