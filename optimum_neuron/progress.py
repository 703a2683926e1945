# SPDX-License-Identifier: Apache-2.0
"""Progress of long stages on a terminal, and one log line per finished stage. It does not know the stages."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol


if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)

# rich allows one live display at a time: an inner stage becomes a further line of the outer one's.
_display: Progress | None = None


class Advance(Protocol):
    """A function that reports a finished step of a stage, from any thread."""

    def __call__(self, description: str, work: float = 1) -> None:
        """Args: work: the step's part of the stage's total."""


@contextmanager
def stage(title: str, total: float | None = None) -> Iterator[Advance]:
    """Time a stage, and show its progress and the time that is left on stderr, if that is a terminal.

    Args:
        total: its work, where that is known: steps, or bytes.
    """
    start = time.perf_counter()
    with _shared_display() as display, _show_task(display, title, total) as advance:
        yield advance
    logger.info("%s: %.1f s", title, time.perf_counter() - start)


@contextmanager
def _show_task(display: Progress | None, title: str, total: float | None) -> Iterator[Advance]:
    if display is None:
        yield lambda description, work=1: None
        return
    task = display.add_task(title, total=total)

    def advance(description: str, work: float = 1) -> None:
        display.update(task, advance=work, description=f"{title}: {description}")

    try:
        yield advance
    finally:
        display.remove_task(task)


@contextmanager
def _shared_display() -> Iterator[Progress | None]:
    global _display
    if _display is not None or not _is_shown():
        yield _display
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    text, times = TextColumn("{task.description}", markup=False), (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (SpinnerColumn(), text, BarColumn(bar_width=24), *times)
    with Progress(*columns, console=Console(stderr=True), transient=True) as _display:
        try:
            yield _display
        finally:
            _display = None


def _is_shown() -> bool:
    # At INFO and below every stage writes a line anyway.
    if not sys.stderr.isatty() or logger.isEnabledFor(logging.INFO):
        return False
    from huggingface_hub.utils import are_progress_bars_disabled

    return not are_progress_bars_disabled()
