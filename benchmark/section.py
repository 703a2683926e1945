# SPDX-License-Identifier: Apache-2.0
"""A section of the results: what the report of one run says, on a terminal and on a page. Knows no benchmark."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from .output import Table, console, publish


Report = Mapping[str, Any]
# Medians nearer than this are level.
LEVEL = 0.03


@dataclass(frozen=True)
class Compared:
    """A number of this project, and those of others.

    Attributes:
        group: the heading of the row, as "bfloat16".
        what: the row.
        more: whether more is better.
    """

    group: str
    what: str
    ours: float
    others: Mapping[str, float]
    more: bool

    @property
    def name(self) -> str:
        """The row without its unit."""
        return self.what.rpartition(", ")[0] or self.what

    def ahead(self) -> dict[str, float]:
        """Return, by name, how many times better each other is; infinite where it takes nothing."""
        if not self.ours:
            return {}
        if self.more:
            return {name: value / self.ours for name, value in self.others.items()}
        return {name: self.ours / value if value else math.inf for name, value in self.others.items()}

    def lost(self) -> dict[str, float]:
        """Return those of `ahead` that win, the first one first."""
        won = {name: times for name, times in self.ahead().items() if times > 1 + LEVEL}
        return dict(sorted(won.items(), key=lambda item: -item[1]))

    def level(self) -> list[str]:
        """Return the others that are level with this project, where none wins."""
        return [] if self.lost() else [name for name, times in self.ahead().items() if times > 1 / (1 + LEVEL)]


@dataclass(frozen=True)
class Section:
    """What a page says of a report.

    Attributes:
        title: the heading.
        about: what is measured, as Markdown.
        tables: all rows of the run.
        compared: the rows that can be lost.
        notes: sentences that the run adds.
        picture: the title of what docs/drawings.py draws of each run, if anything.
    """

    title: str
    about: str
    tables: Callable[[Report], Iterable[Table]]
    compared: Callable[[Report], Iterable[Compared]] = lambda report: ()
    notes: Callable[[Report], Iterable[str]] = lambda report: ()
    picture: str = ""

    def finish(self, report: Report, file: Path | None) -> None:
        """Print the tables, what is lost, and the JSON, which goes into the file as well: the end of each benchmark."""
        out = console(200)
        out.print(", ".join(facts(report)))
        for table in self.tables(report):
            out.print(table)
        for line in (*verdict(list(self.compared(report))), *self.notes(report)):
            out.print(line, markup=False)
        publish(report, file)


def facts(report: Report) -> list[str]:
    """Return what the numbers depend on: CPU, versions, limits, rounds."""
    machine, options = report.get("machine") or {}, report.get("options") or {}
    found = []
    if machine:
        found.append(f"{machine['threads']} threads of {machine['cpu']} with the kernels for {machine['kernels']}")
        versions = {name: machine.get(name) for name in ("torch", "transformers", "vllm")}
        found += [f"{name} {version}" for name, version in versions.items() if version]
    if limits := report.get("limits"):
        products = ", ".join(f"{rate / 1e12:.2f} TFLOP/s in {name}" for name, rate in limits["products"].items())
        found.append(f"limits {limits['read'] / 1e9:.1f} GB/s, {products}")
    rounds = options.get("rounds") or options.get("repeats") or report.get("rounds")
    if isinstance(rounds, int):  # some reports have their rounds there
        found.append(f"{rounds} round{'s' * (rounds > 1)}")
    return found


def verdict(rows: list[Compared]) -> Iterator[str]:
    """Name, group by group, each row that is lost, by how much and to whom, and each that is level."""
    for group, members in groupby(rows, key=lambda row: row.group):
        of_group = [row for row in members if row.ahead()]
        where = f", {group}" if group else ""
        lost = [f"{row.name} ({_by_whom(row.lost())})" for row in of_group if row.lost()]
        level = [f"{row.name} ({', '.join(row.level())})" for row in of_group if row.level()]
        won = sum(not row.lost() and not row.level() for row in of_group)
        if lost:
            yield f"**Lost**{where}: {'; '.join(lost)}."
        if level:
            yield f"**Level**{where}, within {LEVEL:.0%}: {'; '.join(level)}."
        if of_group:
            yield f"Won{where}: {won} of {len(of_group)} rows."


def _by_whom(ahead: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_by(times)}" for name, times in ahead.items())


def _by(times: float) -> str:
    if math.isinf(times):
        return "takes nothing"
    return f"by {times - 1:.0%}" if times < 2 else f"{times:.1f} times"


def page(section: Section, report: Report, file: Path) -> str:
    """Return the section of a report's file as Markdown."""
    parts = [f"## {section.title}", section.about, run_line(report)]
    for table in section.tables(report):
        parts += [*([f"{table.title}:"] if table.title else []), table.markdown()]
    sentences = [*verdict(list(section.compared(report))), *section.notes(report)]
    if sentences:
        parts.append("\n".join(f"- {line}" for line in sentences))
    if section.picture:
        parts.append(f"![{section.picture}](measured/{file.stem}.svg)")
    parts.append(f"All numbers of the run: [{file.name}](../benchmark/published/{file.name}).")
    return "\n\n".join(parts)


def run_line(report: Report) -> str:
    """Return the sentence that names machine, versions, commit, date and command of a run."""
    commit = (report.get("machine") or {}).get("commit")
    day = datetime.date.fromisoformat(report["date"])
    when = f"{day.day} {day:%B %Y}"
    found = [*facts(report), f"commit {commit} ({when})" if commit else when]
    return f"{'; '.join(found)}; `{report['command']}`."
