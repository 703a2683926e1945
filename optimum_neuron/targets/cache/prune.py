# SPDX-License-Identifier: Apache-2.0
"""Upkeep of the compile cache: broken entries are found, and those that were not used for longest make room."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ... import progress
from .entries import BrokenError, CacheEntry, check_code, list_entries, remove_entry
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
    """Remove entries until all together take `limit` bytes; `newest` stays, however large it is."""
    entries = list_entries()
    left = limit - sum(entry.size for entry in entries if entry.path == newest)
    _remove_entries(_find_beyond([entry for entry in entries if entry.path != newest], left))


def prune(
    *, max_size: int | None, older_than: float | None, dry_run: bool
) -> tuple[list[CacheEntry], list[CacheEntry]]:
    """Remove entries.

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
        removed += _find_beyond(kept, max_size)
    gone = {entry.path for entry in removed}
    if not dry_run:
        _remove_entries(removed)
    return removed, [entry for entry in entries if entry.path not in gone]


def _find_beyond(entries: Iterable[CacheEntry], limit: int) -> list[CacheEntry]:
    """Return the entries, the last used first, after those that fit a size together."""
    found, total = [], 0
    for entry in entries:
        total += entry.size
        if total > limit:
            found.append(entry)
    return found


def _remove_entries(entries: Iterable[CacheEntry]) -> None:
    for entry in entries:
        remove_entry(entry.path)


def verify(*, remove: bool) -> Iterator[tuple[CacheEntry, str | None]]:
    """Yield each entry, and what is wrong with it or None; with `remove`, remove broken ones before.

    Entries that another process takes away meanwhile are left out.

    Raises:
        OSError: one is to be removed from a cache that may only be read.
    """
    entries = list(list_entries())
    with progress.stage("Verifying entries", sum(entry.size for entry in entries)) as advance:
        for entry in entries:
            problem = None
            try:
                check_code(entry.path)
            except BrokenError as error:
                if not entry.path.exists():
                    continue
                problem = str(error)
                if remove:
                    remove_entry(entry.path)
            advance(entry.path.name[:16], entry.size)
            yield entry, problem
