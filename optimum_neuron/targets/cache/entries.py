# SPDX-License-Identifier: Apache-2.0
"""Entries of the compile cache on the disk: their files, descriptions, sizes and last use; broken and old ones are removed.

<kind>/<key>/entry.json      the digest of every file of code, checked while it is copied; changed at each use
<kind>/<key>/code.<suffix>   what a target compiled
<kind>/<key>/about.json      its description, for people
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ... import progress
from ...artifact.filesystem import explained_full_disk, open_regular
from ...artifact.partial import partial_folder
from ...artifact.schema import read_object
from ...artifact.user_cache import CACHE_VARIABLE, cache_folder, cache_root, untrusted
from .units import parse_size


SIZE_VARIABLE = "OPTIMUM_NEURON_CACHE_SIZE"
# Of code; what else lies in the user's cache is not compiled, or is an artifact.
KINDS = ("cpu", "kernels", "neuron")
RECORD, ABOUT, CODE = "entry.json", "about.json", "code"
KEY = re.compile(r"[0-9a-f]{64}")
_SUFFIX = re.compile(r"\.[A-Za-z0-9_.-]+")
_LONGEST_NAME = 200


class BrokenError(Exception):
    """An error in an entry: it is not what was stored."""


@dataclass(frozen=True)
class About:
    """The description of an entry, for people; its target is that of the graph, or of kernels the instruction set."""

    graph: str
    target: str
    compiler: str


@dataclass(frozen=True)
class CacheEntry:
    """An entry, whole or broken: bytes of all its files, and its last use in seconds since the epoch."""

    path: Path
    about: About
    size: int
    last_use: float


def list_entries() -> list[CacheEntry]:
    """List the entries of the user's cache, the last used first; raise PermissionError where the cache is not to be trusted."""
    found = []
    for kind in KINDS:
        for path in cache_folder(kind).iterdir() if (cache_root() / kind).is_dir() else ():
            if KEY.fullmatch(path.name):
                with suppress(FileNotFoundError):  # another process may take it away
                    files = path.iterdir() if path.is_dir() else (path,)
                    size = sum(each.lstat().st_size for each in files)
                    record = path / RECORD
                    last_use = (record if record.is_file() else path).lstat().st_mtime
                    found.append(CacheEntry(path, read_about(path), size, last_use))
    return sorted(found, key=lambda entry: (-entry.last_use, entry.path))


def read_about(entry: Path) -> About:
    """Return the description of an entry, with a dash in the place of what cannot be read or printed."""
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        known = read_object(entry / ABOUT)
    names = (known.get(field) for field in ("graph", "target", "compiler"))
    return About(*(
        each if isinstance(each, str) and each.isprintable() and 0 < len(each) <= _LONGEST_NAME else "-"
        for each in names
    ))  # fmt: skip


def write_documents(entry: Path, digests: Mapping[str, str], about: About) -> None:
    """Complete a new entry that has its code."""
    for name, content in ((ABOUT, asdict(about)), (RECORD, dict(digests))):
        path = entry / name
        path.touch(mode=0o600)
        path.write_text(json.dumps(content), encoding="utf-8")


def read_record(entry: Path) -> dict[str, str]:
    """Return digests of code by suffix, or raise BrokenError where the record is missing, damaged or not to be trusted."""
    path = entry / RECORD
    try:
        for each in (entry, path):
            _check_owner(each)
        digests = read_object(path)
    except (OSError, ValueError) as error:
        raise BrokenError(f"{RECORD}: {error}") from error
    if digests and all(_SUFFIX.fullmatch(suffix) and isinstance(digest, str) for suffix, digest in digests.items()):
        return digests
    raise BrokenError(f"{RECORD} names no files and digests")


def check_code(entry: Path) -> dict[str, str]:
    """Return the record of an entry, or raise BrokenError where a file of code is not what was stored."""
    digests = read_record(entry)
    for suffix, digest in digests.items():
        copy_code(entry, suffix, digest, Path(os.devnull))
    return digests


def copy_code(entry: Path, suffix: str, digest: str, copy: Path) -> None:
    """Copy a file of code, or raise BrokenError where it is not what was stored."""
    if copy_file(entry / (CODE + suffix), copy) != digest:
        raise BrokenError(f"{CODE}{suffix} is not what was stored")


def copy_file(source: Path, copy: Path) -> str:
    """Copy a file of code; return its digest. Raise BrokenError where it cannot be read or trusted."""
    digest = hashlib.sha256()
    with explained_full_disk(copy.parent, "name an output folder on another disk"), copy.open("wb") as output:
        for piece in _read_pieces(source):
            digest.update(piece)
            output.write(piece)
    return digest.hexdigest()


def _read_pieces(path: Path) -> Iterator[bytes]:
    try:
        _check_owner(path)
        with open_regular(path) as file:
            while piece := file.read(1 << 20):
                yield piece
    except OSError as error:
        raise BrokenError(f"{path.name}: {error}") from error


def _check_owner(path: Path) -> None:
    if problem := untrusted(path.lstat()):
        raise BrokenError(f"{path.name} {problem}")


@contextmanager
def scratch_folder(kind: Path) -> Iterator[Path]:
    """Yield a folder in that of a kind of entries; raise OSError where the disk is full, or the cache may only be read."""
    remedy = f"set {CACHE_VARIABLE} to a folder"
    if not os.access(kind, os.W_OK | os.X_OK):
        raise PermissionError(f"the compile cache {kind} may not be written to; {remedy} of your own")
    with explained_full_disk(kind, f"{remedy} on another disk"), partial_folder(kind, "compile") as folder:
        yield folder


def remove_entry(entry: Path) -> None:
    """Remove an entry in one step, as others may read it meanwhile."""
    with scratch_folder(entry.parent) as aside, suppress(FileNotFoundError):
        entry.rename(aside / "removed")


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
    for entry in _find_beyond(sorted(list_entries(), key=lambda entry: entry.path != newest), limit):
        if entry.path != newest:
            remove_entry(entry.path)


def prune(
    *, max_size: int | None, older_than: float | None, dry_run: bool
) -> tuple[list[CacheEntry], list[CacheEntry]]:
    """Remove entries; return what is removed, and what stays. Raise OSError where the cache may only be read.

    Args:
        max_size: bytes that the others take together, at most.
        older_than: seconds; what was used before goes.
        dry_run: remove nothing.
    """
    entries = list_entries()
    limit = time.time() - older_than if older_than is not None else 0.0
    removed = [entry for entry in entries if entry.last_use < limit]
    if max_size is not None:
        removed += _find_beyond([entry for entry in entries if entry not in removed], max_size)
    for entry in () if dry_run else removed:
        remove_entry(entry.path)
    return removed, [entry for entry in entries if entry not in removed]


def _find_beyond(entries: Iterable[CacheEntry], limit: int) -> list[CacheEntry]:
    """Return the entries, the last used first, after those that fit a size together."""
    found, total = [], 0
    for entry in entries:
        total += entry.size
        if total > limit:
            found.append(entry)
    return found


def verify(*, remove: bool) -> Iterator[tuple[CacheEntry, str | None]]:
    """Yield each entry, and what is wrong with it or None; with `remove`, remove broken ones. Raise OSError as `scratch_folder`."""
    entries = list_entries()
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
