# SPDX-License-Identifier: Apache-2.0
"""Whether the entries of the compile cache are what was stored."""

from __future__ import annotations

from collections.abc import Iterator

from ... import progress
from .entries import BrokenError, Entry, check_code, list_entries, remove_entry


def verify(*, remove: bool) -> Iterator[tuple[Entry, str | None]]:
    """Yields each entry, and what is wrong with it or None, after it was removed for it where `remove` says so.

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
