# SPDX-License-Identifier: Apache-2.0
"""Predicted beside served: tables, and numbers for JSON. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from optimum_neuron.tools.tune.answers import Figures

from ..output import Table, digits
from ..section import Report, Section


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


def tables(report: Report) -> Iterator[Table]:
    """A table for each candidate."""
    for served in report["served"]:
        table = Table(served["candidate"], ("figure",), ("predicted", "served", "served over predicted"))
        for name, each in served["compared"].items():
            table.add_row(name, digits(each["predicted"]), digits(each["served"]), f"{each['ratio']:.2f}")
        yield table


def notes(report: Report) -> Iterator[str]:
    """What the tuner says, and how far apart both are at most."""
    yield from report["about"]
    ratios = [each["ratio"] for served in report["served"] for each in served["compared"].values()]
    yield f"Served over predicted: {min(ratios):.2f} to {max(ratios):.2f}."


ABOUT = "What `optimum-cli neuron tune` predicts for a trace, and what is then served. [How it is measured](../benchmark/README.md#tune)."
SECTION = Section("Predictions of tune", ABOUT, tables, notes=notes)
