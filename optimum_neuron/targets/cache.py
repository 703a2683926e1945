# SPDX-License-Identifier: Apache-2.0
"""The compile cache: what compilers made, by a digest of all that it depends on. What is broken, or not ours, is never used.

<kind>/<key>/entry.json      the digest of every other file, checked while it is copied
<kind>/<key>/code.<suffix>   what a target compiled
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..artifacts.filesystem import explained_full_disk
from ..artifacts.partial import partial_folder
from ..artifacts.user_cache import CACHE_VARIABLE, cache_folder, untrusted


logger = logging.getLogger(__name__)

_RECORD, _CODE = "entry.json", "code"
_PIECE = 1 << 20


class CompileCache:
    """Entries of one kind. Any number of processes may read and write them at once."""

    def __init__(self, kind: str) -> None:
        """Raises OSError and PermissionError as `cache_folder` does."""
        self.folder = cache_folder(kind)

    def fetch(self, key: str, folder: Path, stem: str, *suffixes: str) -> bool:
        """Copies the files of an entry to `folder/<stem>.<suffix>`.

        Args:
            suffixes: that it must have.

        Returns:
            False where there is no entry, and where it is broken: then it is removed, so that it is compiled again.
        """
        entry = self.folder / key
        if not entry.is_dir():
            return False
        copied: list[Path] = []
        try:
            digests = _read_record(entry)
            if not set(suffixes) <= digests.keys():
                raise _BrokenError(f"it lacks one of {', '.join(suffixes)}")
            for suffix, digest in digests.items():
                copied.append(folder / (stem + suffix))
                if _copy(entry / (_CODE + suffix), copied[-1]) != digest:
                    raise _BrokenError(f"{_CODE}{suffix} is not what was stored")
        except _BrokenError as error:
            logger.warning("%s in the compile cache is compiled again: %s", entry, error)
            for path in copied:
                path.unlink(missing_ok=True)
            self._remove(entry)
            return False
        return True

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder to compile in, on the disk of the cache.

        Raises:
            OSError: the disk is full, or the cache may only be read.
        """
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PermissionError(
                f"the compile cache {self.folder} may not be written to; set {CACHE_VARIABLE} to a folder of your own"
            )
        with (
            explained_full_disk(self.folder, f"set {CACHE_VARIABLE} to a folder on another disk"),
            partial_folder(self.folder, "compile") as folder,
        ):
            yield folder

    def store(self, key: str, scratch: Path, stem: str, folder: Path) -> None:
        """Copies what was compiled, `scratch/<stem>.*`, into a folder, as `fetch` does, and moves it into an entry.

        Where another process has made the same entry meanwhile, that one stays.
        """
        entry = scratch / key
        entry.mkdir(mode=0o700)
        digests = {}
        for path in sorted(scratch.glob(stem + ".*")):
            path.chmod(0o600)
            suffix = path.name.removeprefix(stem)
            digests[suffix] = _copy(path, folder / path.name)
            path.rename(entry / (_CODE + suffix))
        record = entry / _RECORD
        record.touch(mode=0o600)
        record.write_text(json.dumps(digests), encoding="utf-8")
        try:
            entry.rename(self.folder / key)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def forget(self, digest: str) -> None:
        """Removes every entry with a file of this sha256, which turned out to be of no use."""
        for record in self.folder.glob(f"*/{_RECORD}"):
            with suppress(_BrokenError):
                if digest in _read_record(record.parent).values():
                    self._remove(record.parent)

    def _remove(self, entry: Path) -> None:
        """In one step, for whoever reads it meanwhile."""
        with self.scratch() as aside, suppress(FileNotFoundError):
            entry.rename(aside / "removed")


class _BrokenError(Exception):
    """An entry is not what was stored."""


def _read_record(entry: Path) -> dict[str, str]:
    """Digests by suffix."""
    path = entry / _RECORD
    try:
        for each in (entry, path):
            _check_owner(each)
        digests = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _BrokenError(f"{_RECORD}: {error}") from error
    if not isinstance(digests, dict) or not all(
        suffix.startswith(".") and "/" not in suffix and isinstance(digest, str) for suffix, digest in digests.items()
    ):
        raise _BrokenError(f"{_RECORD} names no files and digests")
    return digests


def _copy(source: Path, copy: Path) -> str:
    """Copies a file; returns its digest."""
    digest = hashlib.sha256()
    with explained_full_disk(copy.parent, "name an output folder on another disk"), copy.open("wb") as output:
        for piece in _pieces(source):
            digest.update(piece)
            output.write(piece)
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        _check_owner(path)
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece
    except OSError as error:
        raise _BrokenError(f"{path.name}: {error}") from error


def _check_owner(path: Path) -> None:
    problem = untrusted(path.lstat())
    if problem:
        raise _BrokenError(f"{path.name} {problem}")
