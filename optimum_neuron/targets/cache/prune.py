# SPDX-License-Identifier: Apache-2.0
"""Makes room in the compile cache: entries go whose last use is the longest ago, of all kinds together."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from .entries import Entry, list_entries, remove_entry
from .units import parse_size


SIZE_VARIABLE = "OPTIMUM_NEURON_CACHE_SIZE"


def size_limit() -> int | None:
    """Return the bytes that OPTIMUM_NEURON_CACHE_SIZE allows, if it is set; raise ValueError where it names no size."""
    text = os.environ.get(SIZE_VARIABLE)
    if not text:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{SIZE_VARIABLE}: {error}, or unset it") from error


def keep_within(limit: int, newest: Path) -> None:
    """Removes entries until all together take `limit` bytes; `newest` stays, however large it is."""
    entries = list_entries()
    left = limit - sum(entry.size for entry in entries if entry.path == newest)
    _remove(_beyond([entry for entry in entries if entry.path != newest], left))


def prune(*, max_size: int | None, older_than: float | None, dry_run: bool) -> tuple[list[Entry], list[Entry]]:
    """Removes entries.

    Args:
        max_size: bytes that the others take together, at most.
        older_than: seconds; what was used before goes.
        dry_run: remove nothing.

    Returns:
        What is removed, and what stays.

    Raises:
        OSError: the cache may only be read.
    """
    entries = list_entries()
    limit = time.time() - older_than if older_than is not None else 0.0
    removed = [entry for entry in entries if entry.last_use < limit]
    kept = [entry for entry in entries if entry.last_use >= limit]
    if max_size is not None:
        removed += _beyond(kept, max_size)
    gone = {entry.path for entry in removed}
    if not dry_run:
        _remove(removed)
    return removed, [entry for entry in entries if entry.path not in gone]


def _beyond(entries: Iterable[Entry], limit: int) -> list[Entry]:
    """The entries, the last used first, behind those that fit a size together."""
    found, total = [], 0
    for entry in entries:
        total += entry.size
        if total > limit:
            found.append(entry)
    return found


def _remove(entries: Iterable[Entry]) -> None:
    for entry in entries:
        remove_entry(entry.path)
