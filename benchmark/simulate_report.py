# SPDX-License-Identifier: Apache-2.0
"""Shows simulations: tables for people, a recommendation, a plot, and a JSON document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from simulation import Outcome, Workload
from step_costs import Calibration

from optimum_neuron.config import NeuronConfig
from optimum_neuron.engine.policy import Policy


if TYPE_CHECKING:
    from rich.table import Table

TIMELINE_S = 2.0
COLORS = {"token_generation": "tab:blue", "chunked_prefill": "tab:orange", "mixed": "tab:green"}
REMEDIES = {"itl_p99_ms": "smaller --chunk-sizes", "ttft_p99_ms": "more --replicas"}
MARKERS = {"mixed": "o", "alternate": "s", "prefill_first": "^", "all_chunks": "D"}


class Setting(NamedTuple):
    """What distinguishes a row; users are 0 in an open loop."""

    users: int
    replicas: int
    policy: Policy
    batch_size: int
    chunk_size: int
    ctx_batch_size: int

    def describe(self) -> str:
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"{self.policy}, batch {self.batch_size}, chunk {self.ctx_batch_size} x {self.chunk_size}{replicas}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """All replicas of one setting together, where those that were simulated stand for the others.

    Attributes:
        padded: share of the computed prompt tokens that were padding.
        steps: by kind.
        seconds: simulated, of the replica that took longest.
        busy: share of the time in which a step ran.
        rows_used: share of the decode rows that advanced a request.
        timeline: start, duration (seconds) and kind of some steps of the first replica in a row.
    """

    setting: Setting
    tok_s: float
    req_s: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    itl_max_ms: float
    queue_mean_ms: float
    padded: float
    steps: dict[str, int]
    seconds: float
    busy: float
    rows_used: float
    timeline: list[tuple[float, float, str]]

    @classmethod
    def of(cls, setting: Setting, config: NeuronConfig, outcomes: list[Outcome]) -> Row:
        ttft, itl, queue = (
            np.concatenate([getattr(outcome, name) for outcome in outcomes]) * 1000
            for name in ("ttft", "itl", "queue")
        )
        counted = [outcome.statistics for outcome in outcomes]
        padding, prompt = sum(one.padded_prompt_tokens for one in counted), sum(one.prompt_tokens for one in counted)
        used, idle = sum(one.decode_tokens for one in counted), sum(one.idle_decode_rows for one in counted)
        steps = {kind: sum(outcome.kinds[kind] for outcome in outcomes) for kind in COLORS}
        scale = setting.replicas / len(outcomes)
        return cls(
            setting=setting,
            tok_s=scale * sum((len(outcome.ttft) + len(outcome.itl)) / outcome.seconds for outcome in outcomes),
            req_s=scale * sum(outcome.finished / outcome.seconds for outcome in outcomes),
            ttft_mean_ms=float(ttft.mean()),
            ttft_p50_ms=float(np.percentile(ttft, 50)),
            ttft_p99_ms=float(np.percentile(ttft, 99)),
            itl_mean_ms=float(itl.mean()),
            itl_p50_ms=float(np.percentile(itl, 50)),
            itl_p99_ms=float(np.percentile(itl, 99)),
            itl_max_ms=float(itl.max()),
            queue_mean_ms=float(queue.mean()),
            padded=padding / max(padding + prompt, 1),
            steps={kind: number for kind, number in steps.items() if number},
            seconds=max(outcome.seconds for outcome in outcomes),
            busy=sum(outcome.busy for outcome in outcomes) / sum(outcome.seconds for outcome in outcomes),
            rows_used=used / max(used + idle, 1),
            timeline=outcomes[0].timeline,
        )


class Check(NamedTuple):
    """A published run, simulated."""

    name: str
    published: dict[str, float]
    simulated: dict[str, float]


class Objective(NamedTuple):
    """Limits in milliseconds; None is no limit."""

    itl_p99_ms: float | None = None
    ttft_p99_ms: float | None = None

    def excess(self, row: Row) -> dict[str, float]:
        """By limit: what the row has over what it may have; above 1 the limit is not met."""
        return {name: getattr(row, name) / limit for name, limit in self._asdict().items() if limit is not None}

    def is_met(self, row: Row) -> bool:
        return all(ratio <= 1 for ratio in self.excess(row).values())


@dataclass(frozen=True)
class Report:
    """All results of one run; `workload` is what the rows have in common."""

    calibration: Calibration
    checks: list[Check]
    workload: Workload
    rows: list[Row]
    objective: Objective

    def to_json(self) -> str:
        """One line."""
        rows = []
        for row in self.rows:
            shown = {**row.setting._asdict(), **asdict(row), "meets_objective": self.objective.is_met(row)}
            rows.append({name: value for name, value in shown.items() if name not in ("setting", "timeline")})
        return json.dumps(
            {
                "benchmark": "simulate",
                "calibration": asdict(self.calibration),
                "check": [check._asdict() for check in self.checks],
                "workload": {
                    name: value for name, value in asdict(self.workload).items() if name not in ("users", "requests")
                },
                "objective": self.objective._asdict(),
                "rows": rows,
                "recommendation": recommendations(self.rows, self.objective),
            }
        )


def print_report(report: Report) -> None:
    """The check of the calibration, the sweep, and what follows from it."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    if report.checks:
        console.print(_check_table(report))
    console.print(_sweep_table(report))
    for sentence in recommendations(report.rows, report.objective):
        console.print(sentence)


def _check_table(report: Report) -> Table:
    from rich.table import Table

    table = Table(title=f"Calibration: {report.calibration.source}", title_justify="left")
    table.add_column("simulated workload, policy all_chunks")
    for header in ("figure", "published", "simulated", "ratio"):
        table.add_column(header, justify="right")
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
    yield "/".join(f"{row.steps.get(kind, 0):,}" for kind in COLORS)
    yield f"{row.seconds:,.0f}"
    yield f"{row.busy:.0%}"
    yield f"{row.rows_used:.0%}"


def recommendations(rows: list[Row], objective: Objective) -> list[str]:
    """One sentence for each number of users."""
    sentences = []
    for users, group in groupby(rows, lambda row: row.setting.users):
        whom = f"For {users:,} users" if users else "At this rate"
        sentences.append(f"{whom}, {_recommend(list(group), objective)}")
    return sentences


def _recommend(rows: list[Row], objective: Objective) -> str:
    meeting = [row for row in rows if objective.is_met(row)]
    if meeting:
        fewest = min(row.setting.replicas for row in meeting)
        best = max((row for row in meeting if row.setting.replicas == fewest), key=lambda row: row.tok_s)
        why = (
            "has the best throughput"
            if objective == Objective()
            else "has the best throughput that meets the objective"
        )
        if len({row.setting.replicas for row in rows}) > 1:
            why += " with the fewest replicas"
        return f"{best.setting.describe()} {why}: {_figures(best)}."
    nearest = min(rows, key=lambda row: max(objective.excess(row).values()))
    unmet = [name for name in objective.excess(nearest) if all(objective.excess(row)[name] > 1 for row in rows)]
    limits = " and ".join(f"{_limit(name)} of {getattr(objective, name):g} ms" for name in unmet)
    what = f"nothing meets the {limits}" if unmet else "each limit is met by some setting, but all of them by none"
    remedy = " or ".join(REMEDIES[name] for name, ratio in objective.excess(nearest).items() if ratio > 1)
    return f"{what}; {nearest.setting.describe()} comes nearest: {_figures(nearest)}; try {remedy}."


def _limit(name: str) -> str:
    return name.removesuffix("_p99_ms").upper() + " p99"


def _figures(row: Row) -> str:
    return f"{row.tok_s:,.0f} tok/s, ITL p99 {row.itl_p99_ms:,.0f} ms, TTFT p99 {row.ttft_p99_ms:,.0f} ms"


def plot(report: Report, path: Path) -> None:
    """TTFT against ITL of all rows, larger where throughput is; and steps in a row of one setting of each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    _plot_latencies(left, report)
    _plot_timeline(right, report.rows)
    figure.suptitle(f"Simulated; step times: {report.calibration.source}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


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
    axes.spines[["top", "right"]].set_visible(False)


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
    axes.spines[["top", "right"]].set_visible(False)
