# SPDX-License-Identifier: Apache-2.0
"""Shows simulations: tables, and what follows from them. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ..output import Table, console
from .results import KINDS, Report, Row, Setting, recommendations


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
    table = Table(f"Calibration: {report.calibration.source}", ("simulated workload, policy all_chunks",), headers)
    for check in report.checks:
        for name, published in check.published.items():
            simulated = check.simulated[name]
            table.add_row(check.name, name, f"{published:,.1f}", f"{simulated:,.1f}", f"{simulated / published:.2f}")
        table.add_section()
    return table


def _sweep_table(report: Report) -> Table:
    """What all rows have in common is in the title."""
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
    headers = [names[i].removesuffix("_size").replace("_", " ") for i in shown]
    headers += ["tok/s", "req/s", "TTFT mean", "p50", "p99", "ITL mean", "p50", "p99", "max", "queue", "padded"]
    headers += ["decode/chunk/mixed", "sim s", "busy", "rows used", "objective"]
    if not any(report.objective):
        headers.pop()
    table = Table("; ".join([load, tokens, *common, "times in ms"]), headers[:1], headers[1:])
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
