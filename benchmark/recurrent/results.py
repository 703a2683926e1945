# SPDX-License-Identifier: Apache-2.0
"""The section of a run's results. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..output import Table, digits
from ..section import Compared, Report, Section


OURS = "optimum_neuron"
# Which published model has these sizes, and what is less here.
SHAPES = {
    "qwen3.5": "Qwen3.5-0.8B's text model: 18 of its 24 layers are gated delta nets of 16 heads, 128 x 128",
    "nemotron-h": "Nemotron-H-8B, a quarter as wide and half as deep: 12 of 26 layers are Mamba-2 of 32 heads, 128 x 64",
}
PARTS = ("recurrence", "convolution", "linear layers", "attention", "elementwise", "other")


def tables(report: Report) -> Iterator[Table]:
    """Speeds of all systems, and the parts of this runtime's own runs."""
    yield _speeds(report)
    yield _parts(report)


def compared(report: Report) -> Iterator[Compared]:
    """Prefill and decode of each case."""
    for each in report["cases"]:
        for what, name, more in (("prefill tok/s", "prefill_tok_s", True), ("ms/step", "step_ms", False)):
            others = {system: speed[name]["median"] for system, speed in each["case"]["speeds"].items()}
            yield Compared(", ".join(_place(each)), what, others.pop(OURS), others, more)


def _place(each: dict[str, Any]) -> tuple[str, str, str, str]:
    case = each["case"]
    return each["shape"], each["dtype"], f"{case['batch_size']} rows", f"{case['prompt_length']:,} tokens"


def _speeds(report: Report) -> Table:
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
    return table


def _parts(report: Report) -> Table:
    title = "Shares of this project's own runs, operators one at a time"
    table = Table(title, ("shape", "type", "rows", "prompt", "run"), ("ms", *PARTS, "state"))
    for each in report["cases"]:
        for kind, parts in sorted(each["parts"].items(), reverse=True):
            whole = sum(parts["ms"].values())
            shares = [f"{parts['ms'][name] / whole:.1%}" for name in PARTS]
            table.add_row(*_place(each), kind, digits(whole), *shares, f"{each['state_shares'][kind]:.1%}")
    return table


def notes(report: Report) -> Iterator[str]:
    """The shapes."""
    for name, about in report["shapes"].items():
        yield f"{name}: {about}{', its first layers alone' if report['quick'] else ''}."


ABOUT = """Models of random weights in the shapes of published ones. transformers runs its own torch code, as on each CPU. `at most` is how many times as \
fast a prefill can be on this machine. [How it is measured](../benchmark/README.md#recurrent)."""
SECTION = Section("Models with recurrences", ABOUT, tables, compared, notes)
