# SPDX-License-Identifier: Apache-2.0
"""Shows results: a table for each model and precision, a plot of ratios, and JSON. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ..limits import Limits
from ..output import console, drawing, make_table
from .names import OURS
from .results import Group


@dataclass(frozen=True)
class Report:
    """All results of a run.

    Attributes:
        missing: why peers are in no table.
        notes: what is to be known of the numbers.
    """

    groups: list[Group]
    limits: Limits
    machine: dict[str, Any]
    options: dict[str, Any]
    missing: dict[str, str]
    notes: list[str]

    def to_json(self) -> str:
        """One line."""
        told = {name: getattr(self, name) for name in ("machine", "options", "missing", "notes")}
        groups = [group.to_dict() for group in self.groups]
        return json.dumps({"benchmark": "peers", **told, "limits": asdict(self.limits), "groups": groups})


def print_tables(report: Report, peers: Sequence[str]) -> None:
    """Medians, this project's ratio to each peer (above 1: this project is better), and the share of the machine's limit."""
    out = console(200)
    out.print(f"{report.machine['cpu']}, {report.options['threads']} threads; {report.limits}")
    for group in report.groups:
        out.print(_table(group, peers))
        for peer, reasons in group.reasons.items():
            for reason in reasons:
                out.print(f"  {peer}: {reason}")
    for peer, reason in report.missing.items():
        out.print(f"{peer}: {reason}")
    for note in report.notes:
        out.print(note)


def _table(group: Group, peers: Sequence[str]) -> Table:
    shown = [peer for peer in peers if any(peer in group.values[figure] for figure in group.figures())]
    title = f"{group.model}, {group.precision}: median, x times {OURS} is better, % of the machine's limit"
    table = make_table(title, ("",), shown)
    for figure in group.figures():
        table.add_row(figure, *(cell(group, figure, peer) for peer in shown))
    if group.agreement:
        shares = [group.agreement.get(peer) for peer in shown]
        table.add_row("tokens as the reference's", *("" if share is None else f"{share:.0%}" for share in shares))
    return table


def cell(group: Group, figure: str, peer: str) -> str:
    """A figure, its ratio and its share, where there are such."""
    median, ratio, share = group.median(figure, peer), group.ratio(figure, peer), group.share(figure, peer)
    if median is None:
        return ""
    words = [f"{median:,.0f}" if median >= 100 else f"{median:.1f}"]
    words += [] if ratio is None or peer == OURS else [f"x{ratio:.2f}"]
    words += [] if share is None else [f"{share:.0%}"]
    return " ".join(words)


def plot(report: Report, peers: Sequence[str], path: Path) -> None:
    """For each model and precision that this project has, its ratio to every peer, figure by figure."""
    groups = [group for group in report.groups if any(OURS in of_figure for of_figure in group.values.values())]
    if not groups:
        return
    with drawing(path, len(groups), figsize=(7 * len(groups), 4.5), squeeze=False) as (figure, axes):
        for axis, group in zip(axes[0], groups, strict=True):
            _bars(axis, group, [peer for peer in peers if peer != OURS])
        figure.suptitle(f"{OURS}: times better than each peer, {report.machine['cpu']}", fontsize=10)


def _bars(axes: Any, group: Group, peers: Sequence[str]) -> None:
    figures = [case.figure for case in group.cases if OURS in group.values.get(case.figure, {})]
    width = 0.8 / max(1, len(peers))
    for index, peer in enumerate(peers):
        known = [
            (place, ratio) for place, name in enumerate(figures) if (ratio := group.ratio(name, peer)) is not None
        ]
        if known:
            places = [place + (index - (len(peers) - 1) / 2) * width for place, _ in known]
            heights = [ratio - 1 for _, ratio in known]  # up where this project is ahead, down where it is behind
            axes.bar(places, heights, width * 0.92, bottom=1, color=f"C{index}", label=peer)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xticks(range(len(figures)), [name.partition(", ")[0] for name in figures], rotation=20, fontsize=8)
    axes.set_title(f"{group.model}, {group.precision}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7)
