# SPDX-License-Identifier: Apache-2.0
"""Progress of long stages on a terminal, and one log line per finished stage. Knows nothing of what the stages do."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)

# rich allows one live display at a time: an inner stage becomes a further line of the outer one's.
_display: Progress | None = None


@contextmanager
def stage(title: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Times a stage of `total` steps, where that is known, and shows its progress on stderr, if that is a terminal.

    Yields `advance(description)`, to be called when a step is done, from any thread.
    """
    start = time.perf_counter()
    with _shared_display() as display, _task(display, title, total) as advance:
        yield advance
    logger.info("%s: %.1f s", title, time.perf_counter() - start)


@contextmanager
def _task(display: Progress | None, title: str, total: int | None) -> Iterator[Callable[[str], None]]:
    if display is None:
        yield lambda description: None
        return
    task = display.add_task(title, total=total)

    def advance(description: str) -> None:
        display.update(task, advance=1, description=f"{title}: {description}")

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
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as _display:
        try:
            yield _display
        finally:
            _display = None


def _is_shown() -> bool:
    from huggingface_hub.utils import are_progress_bars_disabled

    # At INFO and below every stage writes a line anyway.
    return sys.stderr.isatty() and not are_progress_bars_disabled() and not logger.isEnabledFor(logging.INFO)
