# SPDX-License-Identifier: Apache-2.0
"""Digests of large files, remembered in the user's cache: a file that was not written to since is not hashed again.

verified/<device>-<inode>.json   the system's facts about a file when it was hashed, and its sha256
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from mmap import mmap
from pathlib import Path

from .schema import read_object
from .user_cache import cache_folder, untrusted


logger = logging.getLogger(__name__)

CACHE_KIND = "verified"
_MOST_RECORDS = 256
# Some file systems count times in seconds: a second write may leave a ctime that is younger than this as it is.
_SETTLED_NS = 2_000_000_000


def read_verified(descriptor: int, read: Callable[[], mmap], expected: str) -> tuple[mmap, str]:
    """Return a file's content and its hex digest, which is computed only where no record says that it is the expected one.

    Args:
        descriptor: the open file, on a file system that gives a written file a new ctime (`filesystem.is_local`).
        read: copies or maps all of the file.
    """
    status, now = os.fstat(descriptor), time.time_ns()
    record = _file_facts(status) | {"sha256": expected}
    content = read()
    if _has_record(status, record) and _file_facts(os.fstat(descriptor)) == _file_facts(status):
        return content, expected
    digest = hashlib.sha256(content).hexdigest()
    settled = now - status.st_ctime_ns > _SETTLED_NS and _file_facts(os.fstat(descriptor)) == _file_facts(status)
    if digest == expected and settled:
        _keep_record(status, record)
    return content, digest


def _file_facts(status: os.stat_result) -> dict[str, int | str]:
    """Return facts that change with a file's content, whoever writes to it and whatever times are put back."""
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}


def _record_path(status: os.stat_result) -> Path:
    """Return the path of a file's record; raise OSError where there is no cache, or it is not to be trusted."""
    return cache_folder(CACHE_KIND) / f"{status.st_dev:x}-{status.st_ino:x}.json"


def _has_record(status: os.stat_result, record: dict[str, int | str]) -> bool:
    try:
        path = _record_path(status)
        return untrusted(path.lstat()) is None and read_object(path) == record
    except (OSError, ValueError):
        return False


def _keep_record(status: os.stat_result, record: dict[str, int | str]) -> None:
    """Write a record, or log why the file will be hashed again."""
    try:
        path = _record_path(status)
        _remove_oldest(path.parent)
        descriptor, unfinished = tempfile.mkstemp(dir=path.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(unfinished, path)
        except BaseException:
            os.unlink(unfinished)
            raise
    except OSError as error:
        logger.info("each load of the weights will hash them, as the digest cannot be kept: %s", error)


def _remove_oldest(folder: Path) -> None:
    """Make room for a record; files of killed processes go with the oldest."""
    names = os.listdir(folder)
    if len(names) < _MOST_RECORDS:
        return
    ages: dict[Path, int] = {}
    for path in map(folder.joinpath, names):
        with suppress(FileNotFoundError):  # another process has removed it
            ages[path] = path.lstat().st_mtime_ns
    for path in sorted(ages, key=ages.__getitem__)[: len(names) - _MOST_RECORDS + 1]:
        path.unlink(missing_ok=True)
