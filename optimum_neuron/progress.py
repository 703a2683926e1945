# SPDX-License-Identifier: Apache-2.0
"""Progress of long stages on a terminal, and one log line per finished stage. It knows one of them, the imports before all others."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol


if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)

# rich allows one live display at a time: a further stage, in this thread or another, becomes a further line of it.
_display: Progress | None = None
_lock = threading.Lock()
# A spinner, two times, and blanks between.
_WIDTH_OF_OTHERS = 1 + 2 * 8 + 5
_stages = 0


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
def importing() -> Iterator[None]:
    """Show that torch and transformers are imported, which takes seconds."""
    with stage("Importing torch and transformers"), hold_collector():
        yield


@contextmanager
def hold_collector() -> Iterator[None]:
    """Hold Python's garbage collector: it would walk many new objects again and again to free none."""
    resume = gc.enable if gc.isenabled() else gc.disable
    gc.disable()
    try:
        yield
    finally:
        resume()


@contextmanager
def _shared_display() -> Iterator[Progress | None]:
    """Yield the display, which appears with the first of the stages that run, and goes with the last; None where none is shown."""
    global _display, _stages
    if not _is_shown():
        yield None
        return
    with _lock:
        if _stages == 0:
            _display = _make_display()
            _display.start()
        _stages += 1
    try:
        yield _display
    finally:
        with _lock:
            _stages -= 1
            if _stages == 0 and _display is not None:
                _display.stop()
                _display = None


def _make_display() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Column

    console = Console(stderr=True)
    bar = min(24, console.width // 6)
    # rich would shorten all columns of a line that is too long, the times too.
    description = Column(no_wrap=True, max_width=max(8, console.width - bar - _WIDTH_OF_OTHERS))
    text, times = TextColumn("{task.description}", markup=False, table_column=description), TimeElapsedColumn()
    columns = (SpinnerColumn(), text, BarColumn(bar_width=bar), times, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


def _is_shown() -> bool:
    # At INFO and below every stage writes a line anyway.
    if not sys.stderr.isatty() or logger.isEnabledFor(logging.INFO):
        return False
    from huggingface_hub.utils import are_progress_bars_disabled

    return not are_progress_bars_disabled()
