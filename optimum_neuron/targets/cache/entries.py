# SPDX-License-Identifier: Apache-2.0
"""Entries of the compile cache on the disk: their files, descriptions, sizes and last use.

<kind>/<key>/entry.json      the digest of every file of code, checked while it is copied; changed at each use
<kind>/<key>/code.<suffix>   what a target compiled
<kind>/<key>/about.json      its description, for people
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...artifact.filesystem import explained_full_disk, open_regular
from ...artifact.partial import partial_folder
from ...artifact.schema import read_object
from ...artifact.user_cache import CACHE_VARIABLE, cache_folder, cache_root, untrusted


# Of code; what else lies in the user's cache is not compiled, or is an artifact.
KINDS = ("cpu", "kernels", "neuron")
RECORD, ABOUT, CODE = "entry.json", "about.json", "code"
KEY = re.compile(r"[0-9a-f]{64}")
_SUFFIX = re.compile(r"\.[A-Za-z0-9_.-]+")
_PIECE = 1 << 20
_UNKNOWN, _LONGEST_NAME = "-", 200


class BrokenError(Exception):
    """An error in an entry: it is not what was stored."""


@dataclass(frozen=True)
class About:
    """The description of an entry, for people: a key alone decides whether an entry is used.

    Attributes:
        target: of the graph, or of kernels the instruction set.
        compiler: with its version.
    """

    graph: str
    target: str
    compiler: str


@dataclass(frozen=True)
class CacheEntry:
    """An entry, whole or broken.

    Attributes:
        size: of all its files, in bytes.
        last_use: seconds since the epoch.
    """

    path: Path
    about: About
    size: int
    last_use: float


def list_entries() -> list[CacheEntry]:
    """List the entries of the user's cache, the last used first, but for those that another process takes away meanwhile.

    Raises:
        PermissionError: the cache is not to be trusted.
    """
    found = []
    for kind in KINDS:
        if (cache_root() / kind).is_dir():
            for path in cache_folder(kind).iterdir():
                if KEY.fullmatch(path.name):
                    with suppress(FileNotFoundError):
                        found.append(_look_at(path))
    return sorted(found, key=lambda entry: (-entry.last_use, entry.path))


def _look_at(path: Path) -> CacheEntry:
    size = sum(each.lstat().st_size for each in path.iterdir()) if path.is_dir() else path.lstat().st_size
    record = path / RECORD
    last_use = (record if record.is_file() else path).lstat().st_mtime
    return CacheEntry(path, read_about(path), size, last_use)


def read_about(entry: Path) -> About:
    """Return the description of an entry, with a dash in the place of what cannot be read or printed."""
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        known = read_object(entry / ABOUT)
    return About(*(_printable_name(known.get(field)) for field in ("graph", "target", "compiler")))


def _printable_name(value: object) -> str:
    is_name = isinstance(value, str) and value.isprintable() and 0 < len(value) <= _LONGEST_NAME
    return str(value) if is_name else _UNKNOWN


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
    if not digests or not all(
        _SUFFIX.fullmatch(suffix) and isinstance(digest, str) for suffix, digest in digests.items()
    ):
        raise BrokenError(f"{RECORD} names no files and digests")
    return digests


def copy_file(source: Path, copy: Path) -> str:
    """Copy a file of code; return its digest. Raise BrokenError where it cannot be read or trusted."""
    digest = hashlib.sha256()
    with explained_full_disk(copy.parent, "name an output folder on another disk"), copy.open("wb") as output:
        for piece in _read_pieces(source):
            digest.update(piece)
            output.write(piece)
    return digest.hexdigest()


def check_code(entry: Path) -> dict[str, str]:
    """Return the record of an entry, or raise BrokenError where a file of code is not what was stored."""
    digests = read_record(entry)
    for suffix, expected in digests.items():
        digest = hashlib.sha256()
        for piece in _read_pieces(entry / (CODE + suffix)):
            digest.update(piece)
        check_digest(suffix, digest.hexdigest(), expected)
    return digests


def check_digest(suffix: str, found: str, expected: str) -> None:
    if found != expected:
        raise BrokenError(f"{CODE}{suffix} is not what was stored")


def _read_pieces(path: Path) -> Iterator[bytes]:
    try:
        _check_owner(path)
        with open_regular(path) as file:
            while piece := file.read(_PIECE):
                yield piece
    except OSError as error:
        raise BrokenError(f"{path.name}: {error}") from error


def _check_owner(path: Path) -> None:
    problem = untrusted(path.lstat())
    if problem:
        raise BrokenError(f"{path.name} {problem}")


@contextmanager
def scratch_folder(kind: Path) -> Iterator[Path]:
    """Yield a folder on the disk of the cache; remove what killed processes left of theirs.

    Args:
        kind: the folder of a kind of entries.

    Raises:
        OSError: the disk is full, or the cache may only be read.
    """
    if not os.access(kind, os.W_OK | os.X_OK):
        raise PermissionError(
            f"the compile cache {kind} may not be written to; set {CACHE_VARIABLE} to a folder of your own"
        )
    with (
        explained_full_disk(kind, f"set {CACHE_VARIABLE} to a folder on another disk"),
        partial_folder(kind, "compile") as folder,
    ):
        yield folder


def remove_entry(entry: Path) -> None:
    """Remove an entry in one step, as others may read it meanwhile."""
    with scratch_folder(entry.parent) as aside, suppress(FileNotFoundError):
        entry.rename(aside / "removed")
