# SPDX-License-Identifier: Apache-2.0
"""Shows simulations: tables, what follows from them, and a plot. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..output import console, drawing, make_table
from .results import KINDS, Report, Row, Setting, recommendations


if TYPE_CHECKING:
    from rich.table import Table

TIMELINE_S = 2.0
COLORS = dict(zip(KINDS, ("tab:blue", "tab:orange", "tab:green"), strict=True))
MARKERS = {"mixed": "o", "alternate": "s", "prefill_first": "^", "all_chunks": "D"}


def print_report(report: Report) -> None:
    """The check of the calibration, the sweep, and what follows from it."""
    out = console(200)
    if report.checks:
        out.print(_check_table(report))
    out.print(_sweep_table(report))
    for sentence in recommendations(report.rows, report.objective):
        out.print(sentence)


def _check_table(report: Report) -> Table:
    headers = ("figure", "published", "simulated", "ratio")
    table = make_table(
        f"Calibration: {report.calibration.source}", ("simulated workload, policy all_chunks",), headers
    )
    for check in report.checks:
        for name, published in check.published.items():
            simulated = check.simulated[name]
            table.add_row(check.name, name, f"{published:,.1f}", f"{simulated:,.1f}", f"{simulated / published:.2f}")
        table.add_section()
    return table


def _sweep_table(report: Report) -> Table:
    """What all rows have in common is in the title."""
    from rich.table import Table

    work, names = report.workload, Setting._fields
    settings = [row.setting for row in report.rows]
    shown = [
        i for i, name in enumerate(names) if name in ("policy", "chunk_size") or len({s[i] for s in settings}) > 1
    ]
    common = [
        f"{names[i].replace('_', ' ')} {settings[0][i]:,}"
        for i in range(len(names))
        if settings[0][i] and i not in shown
    ]
    load = f"{work.rate:g} requests/s" if work.rate else "users without pauses"
    tokens = f"prompts of {work.prompt_tokens:,} and outputs of {work.new_tokens:,} tokens"
    table = Table(title="; ".join([load, tokens, *common, "times in ms"]), title_justify="left")
    headers = [names[i].removesuffix("_size").replace("_", " ") for i in shown]
    headers += ["tok/s", "req/s", "TTFT mean", "p50", "p99", "ITL mean", "p50", "p99", "max", "queue", "padded"]
    headers += ["decode/chunk/mixed", "sim s", "busy", "rows used", "objective"]
    if not any(report.objective):
        headers.pop()
    for header in headers:
        table.add_column(header, justify="left" if header == "policy" else "right", no_wrap=True)
    for _, rows in groupby(report.rows, lambda row: row.setting[:4]):
        for row in rows:
            met = "met" if report.objective.is_met(row) else "missed"
            setting = [row.setting[i] for i in shown]
            cells = [value if isinstance(value, str) else f"{value:,}" for value in setting]
            table.add_row(*cells, *_numbers(row), *([met] if any(report.objective) else []))
        table.add_section()
    return table


def _numbers(row: Row) -> Iterator[str]:
    yield f"{row.tok_s:,.1f}"
    yield f"{row.req_s:,.2f}"
    for name, value in vars(row).items():
        if name.endswith("_ms"):
            yield f"{value:,.1f}" if name.startswith("itl") else f"{value:,.0f}"
    yield f"{row.padded:.0%}"
    yield "/".join(f"{row.steps.get(kind, 0):,}" for kind in KINDS)
    yield f"{row.seconds:,.0f}"
    yield f"{row.busy:.0%}"
    yield f"{row.rows_used:.0%}"


def plot(report: Report, path: Path) -> None:
    """TTFT against ITL of all rows, larger where throughput is; and steps in a row of one setting of each policy."""
    with drawing(path, 2, figsize=(13, 5)) as (figure, (left, right)):
        _plot_latencies(left, report)
        _plot_timeline(right, report.rows)
        figure.suptitle(f"Simulated; step times: {report.calibration.source}", fontsize=10)


def _plot_latencies(axes: Any, report: Report) -> None:
    most = max(row.tok_s for row in report.rows)
    for policy, marker in MARKERS.items():
        rows = [row for row in report.rows if row.setting.policy == policy]
        if not rows:
            continue
        sizes = [20 + 130 * (row.tok_s / most) ** 3 for row in rows]
        x, y = [row.itl_p99_ms for row in rows], [row.ttft_p99_ms for row in rows]
        axes.scatter(x, y, sizes, marker=marker, label=policy, alpha=0.7)
        for row in rows:
            label = f"{row.setting.chunk_size}: {row.tok_s:,.0f}"
            axes.annotate(label, (row.itl_p99_ms, row.ttft_p99_ms), (5, 5), textcoords="offset points", fontsize=7)
    for limit, line in zip(report.objective, (axes.axvline, axes.axhline), strict=True):
        if limit is not None:
            line(limit, color="grey", lw=0.8, ls="--")
    title = "Latencies; labels: chunk size: tok/s"
    axes.set(xscale="log", yscale="log", xlabel="ITL p99, ms", ylabel="TTFT p99, ms", title=title)
    axes.legend(frameon=False, fontsize=8)


def _plot_timeline(axes: Any, rows: list[Row]) -> None:
    middle = sorted({row.setting.chunk_size for row in rows})
    chunk = middle[len(middle) // 2]
    shown = {row.setting.policy: row for row in reversed(rows) if row.setting.chunk_size == chunk and row.timeline}
    for place, row in enumerate(shown.values()):
        start = row.timeline[0][0]
        for kind, color in COLORS.items():
            bars = [(at - start, took) for at, took, step in row.timeline if step == kind and at - start < TIMELINE_S]
            axes.broken_barh(bars, (place - 0.35, 0.7), color=color, edgecolor="white", lw=0.4)
    for kind, color in COLORS.items():
        axes.bar(0, 0, color=color, label=kind)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.set(xlim=(0, TIMELINE_S), xlabel="seconds, from the middle of the run", title=f"Steps, chunk size {chunk}")
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
