# SPDX-License-Identifier: Apache-2.0
"""How every benchmark ends: tables, a plot, a file, and one line of JSON. Measures nothing and needs no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum_neuron.cli import write_json


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def warn(message: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"warning: {message}\n")


def console(width: int = 150) -> Console:
    """Where tables go: stdout, of so many columns where it is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, highlight=False)


def make_table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table of columns with texts, which are not broken, then of columns with numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for header in texts:
        table.add_column(header, no_wrap=True)
    for header in numbers:
        table.add_column(header, justify="right")
    return table


@contextmanager
def drawing(path: Path, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure of matplotlib and its axes side by side, written as a PNG when the block ends.

    Args:
        options: of `pyplot.subplots`.

    Raises:
        ImportError: there is no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, layout="constrained", **options)
    yield figure, axes
    for each in figure.axes:
        each.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def publish(text: str, file: Path | None, draw: Callable[[], None] = lambda: None) -> None:
    """Draws the plot, where matplotlib is, and prints the results as the last line of stdout.

    Args:
        text: a JSON object on one line.
        file: where to write it as well, indented.
    """
    try:
        draw()
    except ImportError:
        warn("no plot: pip install matplotlib")
    if file is not None:
        write_json(file, json.loads(text))
    print(text, flush=True)
