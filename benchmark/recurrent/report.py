# SPDX-License-Identifier: Apache-2.0
"""Shows results: tables for people, and a JSON document for programs. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..limits import Limits
from ..measure import Case
from ..output import Table, digits
from ..section import Compared, Section
from ..section import Report as Json
from ..systems import OURS
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

    def to_dict(self) -> dict[str, Any]:
        """JSON-serializable."""
        cases = [each.to_dict(self.limits) for each in self.cases]
        return {"benchmark": "recurrent", **asdict(self), "cases": cases}


def tables(report: Json) -> Iterator[Table]:
    """Speeds of all systems, and the parts of this runtime's own runs."""
    yield _speeds(report)
    yield _parts(report)


def compared(report: Json) -> Iterator[Compared]:
    """Prefill and decode of each case."""
    for each in report["cases"]:
        speeds = each["case"]["speeds"]
        for what, name, more in (("prefill tok/s", "prefill_tok_s", True), ("ms/step", "step_ms", False)):
            others = {system: speed[name]["median"] for system, speed in speeds.items() if system != OURS}
            yield Compared(", ".join(_place(each)), what, speeds[OURS][name]["median"], others, more)


def _place(each: dict[str, Any]) -> tuple[str, str, str, str]:
    case = each["case"]
    return each["shape"], each["dtype"], f"{case['batch_size']} rows", f"{case['prompt_length']:,} tokens"


def _speeds(report: Json) -> Table:
    numbers = ("prefill tok/s", "ratio", "at most", "ms/step", "ratio", "equal tokens", "state MB a row", "weights MB")
    title = "Medians; a ratio above 1 means that this project is faster"
    table = Table(title, ("shape", "type", "rows", "prompt", "system"), numbers)
    for each in report["cases"]:
        for name, speed in each["case"]["speeds"].items():
            ratio, agreement = each["ratios"].get(name), each["case"]["agreement"].get(name)
            table.add_row(
                *_place(each),
                "this project" if name == OURS else f"transformers, {name}",
                digits(speed["prefill_tok_s"]["median"]),
                f"{ratio['prefill']:.2f}" if ratio else "",
                f"{each['at_most'][name]:.2f}",
                digits(speed["step_ms"]["median"]),
                f"{ratio['decode']:.2f}" if ratio else "",
                f"{agreement['equal_tokens'] / agreement['tokens']:.0%}" if agreement else "",
                "" if ratio else f"{each['state_bytes'] / 1e6:.1f}",
                "" if ratio else f"{each['weights_bytes'] / 1e6:,.0f}",
            )
        table.add_section()
    return table


def _parts(report: Json) -> Table:
    title = "Shares of this project's own runs, operators one at a time"
    table = Table(title, ("shape", "type", "rows", "prompt", "run"), ("ms", *NAMES, "state"))
    for each in report["cases"]:
        for kind, parts in sorted(each["parts"].items(), reverse=True):
            whole = sum(parts["ms"].values())
            shares = [f"{parts['ms'][name] / whole:.1%}" for name in NAMES]
            table.add_row(*_place(each), kind, digits(whole), *shares, f"{each['state_shares'][kind]:.1%}")
        table.add_section()
    return table


def notes(report: Json) -> Iterator[str]:
    """The shapes."""
    for name, about in report["shapes"].items():
        yield f"{name}: {about}{', its first layers alone' if report['quick'] else ''}."


ABOUT = """Models of random weights in the shapes of published ones. transformers runs its own torch code, as on each CPU. `at most` is how many times as \
fast a prefill can be on this machine. [How it is measured](../benchmark/README.md#recurrent)."""
SECTION = Section("Models with recurrences", ABOUT, tables, compared, notes)
