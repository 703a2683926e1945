# SPDX-License-Identifier: Apache-2.0
"""The end of every benchmark: tables, a file, and one line of JSON. Measures nothing and needs no torch."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum_neuron.cli import write_json


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

# Options with places of one machine: a published command leaves them out.
PLACES = ("--json", "--artifacts", "--folder", "--vllm-cpu-python")


def warn(message: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"warning: {message}\n")


def console(width: int = 150) -> Console:
    """Where tables go: stdout, of so many columns where it is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, highlight=False)


@dataclass
class Table:
    """A table of columns with texts, then of columns with numbers, for a terminal and for a Markdown page."""

    title: str
    texts: Sequence[str]
    numbers: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        self.rows.append(cells)

    def __rich__(self) -> RichTable:
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, title_justify="left")
        for header in self.texts:
            table.add_column(header, no_wrap=True)
        for header in self.numbers:
            table.add_column(header, justify="right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Return the table's lines, without its title."""
        heads = [*self.texts, *self.numbers]
        rule = ["---"] * len(self.texts) + ["--:"] * len(self.numbers)
        lines = (heads, rule, *self.rows)
        return "\n".join("".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in lines)


def digits(value: float | None) -> str:
    """Return a number with about three digits, and nothing for None."""
    if not value:
        return "" if value is None else "0"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def command_line(words: Sequence[str]) -> str:
    """Return the command of a run, without the places of its machine.

    Args:
        words: of the process, the interpreter first.
    """
    kept: list[str] = []
    skipped = False
    for word in words[1:]:
        if not word.startswith("-") and skipped:
            skipped = False
            continue
        skipped = word in PLACES
        if word.partition("=")[0] not in PLACES:
            kept.append(word)
    return shlex.join(["python", *kept])


def publish(report: Mapping[str, Any], file: Path | None) -> None:
    """Print the results as the last line of stdout.

    Args:
        report: the results; the command and the date are added.
        file: where to write it as well, indented.
    """
    record = {"command": command_line(sys.orig_argv), "date": datetime.now(timezone.utc).date().isoformat(), **report}
    text = json.dumps(record, default=str)
    if file is not None:
        write_json(file, json.loads(text))
    print(text, flush=True)
