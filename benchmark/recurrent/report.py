# SPDX-License-Identifier: Apache-2.0
"""Shows results: tables for people, and a JSON document for programs. Measures nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from ..limits import Limits
from ..measure import Case
from ..output import console, make_table
from .parts import NAMES, Parts


@dataclass(frozen=True)
class ShapeCase:
    """A shape in a type, at one number of rows and length of prompts.

    Attributes:
        state_bytes: what a slot keeps beside keys and values.
        weights_bytes: of the artifact's file.
        parts: of our own "prefill" run and "decode" step.
        operations: of a call's prompts, in products with weights alone.
    """

    shape: str
    dtype: str
    case: Case
    state_bytes: int
    weights_bytes: int
    parts: dict[str, Parts]
    operations: int

    def at_most(self, limits: Limits) -> dict[str, float]:
        """By system, how many times as fast as its prefill one is that takes no time but for these products, at the machine's rate of them."""
        shortest = self.operations / limits.products[self.dtype]
        tokens = self.case.batch_size * self.case.prompt_length
        return {name: tokens / speed.prefill_tok_s.median / shortest for name, speed in self.case.speeds.items()}

    def to_dict(self, limits: Limits) -> dict[str, Any]:
        shares = {kind: parts.state_share for kind, parts in self.parts.items()}
        most = self.at_most(limits)
        return {**asdict(self), "ratios": self.case.ratios(), "at_most": most, "state_shares": shares}


@dataclass(frozen=True)
class Report:
    """All results of one run."""

    shapes: dict[str, str]
    quick: bool
    new_tokens: int
    rounds: int
    machine: dict[str, Any]
    limits: Limits
    cases: list[ShapeCase]

    def to_json(self) -> str:
        """One line."""
        cases = [each.to_dict(self.limits) for each in self.cases]
        return json.dumps({"benchmark": "recurrent", **asdict(self), "cases": cases})


def print_tables(report: Report) -> None:
    """Medians; a ratio above 1 means that this runtime is faster."""
    out, machine = console(170), report.machine
    out.print(
        f"{machine['cpu']}, {machine['threads']} threads, {machine['kernels']}, torch {machine['torch']}, transformers "
        f"{machine['transformers']}, {report.new_tokens} new tokens, {report.rounds} rounds"
    )
    out.print(str(report.limits))
    for name, about in report.shapes.items():
        out.print(f"{name}: {about}{', its first layers alone' if report.quick else ''}")
    out.print(_speeds(report.cases, report.limits))
    out.print(_parts(report.cases))


def _speeds(cases: list[ShapeCase], limits: Limits) -> Table:
    numbers = ("prefill tok/s", "ratio", "at most", "ms/step", "ratio", "equal tokens", "state MB a row", "weights MB")
    table = make_table(
        "Medians; ratios are this runtime's, above 1 is faster", ("shape", "type", "rows", "prompt", "system"), numbers
    )
    for each in cases:
        case, ratios, most = each.case, each.case.ratios(), each.at_most(limits)
        for name, speed in case.speeds.items():
            ratio, agreement = ratios.get(name), case.agreement.get(name)
            table.add_row(
                each.shape,
                each.dtype,
                str(case.batch_size),
                f"{case.prompt_length:,}",
                name,
                f"{speed.prefill_tok_s.median:,.0f}",
                f"{ratio['prefill']:.2f}" if ratio else "",
                f"{most[name]:.2f}",
                f"{speed.step_ms.median:,.1f}",
                f"{ratio['decode']:.2f}" if ratio else "",
                f"{agreement.equal_tokens / agreement.tokens:.0%}" if agreement else "",
                "" if ratio else f"{each.state_bytes / 1e6:.1f}",
                "" if ratio else f"{each.weights_bytes / 1e6:,.0f}",
            )
        table.add_section()
    return table


def _parts(cases: list[ShapeCase]) -> Table:
    title = "What of a run of this runtime's graphs is for what, operators one at a time"
    table = make_table(title, ("shape", "type", "rows", "prompt", "run"), ("ms", *NAMES, "state"))
    for each in cases:
        for kind, parts in sorted(each.parts.items(), reverse=True):
            whole = sum(parts.ms.values())
            table.add_row(
                each.shape,
                each.dtype,
                str(each.case.batch_size),
                f"{each.case.prompt_length:,}",
                kind,
                f"{whole:,.1f}",
                *(f"{parts.ms[name] / whole:.1%}" for name in NAMES),
                f"{parts.state_share:.1%}",
            )
        table.add_section()
    return table
