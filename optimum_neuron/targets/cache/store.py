# SPDX-License-Identifier: Apache-2.0
"""The compile cache as targets use it: what is broken, or of another user, is never used."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from ...artifact.user_cache import cache_folder
from . import entries
from .entries import CODE, RECORD, About, BrokenError, read_record, remove_entry


logger = logging.getLogger(__name__)


class CompileCache:
    """Entries of one kind. Any number of processes may read, write and remove them at once."""

    def __init__(self, kind: str) -> None:
        """Raise OSError and PermissionError as `cache_folder`, and ValueError as `size_limit`."""
        self.folder = cache_folder(kind)
        self._limit = entries.size_limit()

    def fetch(self, key: str, folder: Path, stem: str, *suffixes: str) -> bool:
        """Copy the files of an entry, which must have those of `suffixes`, to `folder/<stem>.<suffix>`.

        Return False where there is no entry, and where it is broken: then it is removed, so that it is compiled again.
        """
        entry = self.folder / key
        if not entry.is_dir():
            return False
        copied: list[Path] = []
        try:
            digests = read_record(entry)
            # First, so that a process that makes room does not take it for unused; a cache that may only be read keeps no uses.
            with suppress(OSError):
                os.utime(entry / RECORD)
            if not set(suffixes) <= digests.keys():
                raise BrokenError(f"it lacks one of {', '.join(suffixes)}")
            for suffix, digest in digests.items():
                copied.append(folder / (stem + suffix))
                entries.copy_code(entry, suffix, digest, copied[-1])
        except BrokenError as error:
            for path in copied:
                path.unlink(missing_ok=True)
            if entry.is_dir():  # else another process made room meanwhile
                logger.warning("%s in the compile cache is compiled again: %s", entry, error)
                remove_entry(entry)
            return False
        return True

    def scratch(self) -> AbstractContextManager[Path]:
        """Return a folder to compile in, as `scratch_folder`."""
        return entries.scratch_folder(self.folder)

    def store(self, key: str, scratch: Path, stem: str, folder: Path, about: About) -> None:
        """Copy what was compiled, `scratch/<stem>.*`, into a folder, as `fetch` does, and move it into an entry.

        An equal entry of another process stays. Those that were used last stay within the cache's size limit, this one in any case.
        """
        entry = scratch / key
        entry.mkdir(mode=0o700)
        digests = {}
        for path in sorted(scratch.glob(stem + ".*")):
            path.chmod(0o600)
            suffix = path.name.removeprefix(stem)
            digests[suffix] = entries.copy_file(path, folder / path.name)
            path.rename(entry / (CODE + suffix))
        entries.write_documents(entry, digests, about)
        self.admit(entry)

    def admit(self, entry: Path) -> None:
        """Move a complete folder on the disk of the cache, named by its key, into its place."""
        place = self.folder / entry.name
        try:
            entry.rename(place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if self._limit is not None:
            entries.keep_within(self._limit, place)

    def forget(self, digest: str) -> None:
        """Remove all entries with a file of this sha256, which cannot be used."""
        for record in self.folder.glob(f"*/{RECORD}"):
            with suppress(BrokenError):
                if digest in read_record(record.parent).values():
                    remove_entry(record.parent)
