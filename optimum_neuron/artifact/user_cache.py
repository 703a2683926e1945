# SPDX-License-Identifier: Apache-2.0
"""The user's cache: folders that are kept between runs, and trusted only where no other user can have written to them.

verified/<device>-<inode>.json   facts of the system about a large file when it was hashed, and its sha256: a file that was not written
                                 to since is not hashed again
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from mmap import mmap
from pathlib import Path

import huggingface_hub.constants

from .filesystem import replace_file
from .schema import read_object


logger = logging.getLogger(__name__)

CACHE_VARIABLE = "OPTIMUM_NEURON_CACHE"
VERIFIED_KIND = "verified"
_MOST_RECORDS = 256
# Some file systems count times in seconds: a second write may leave a ctime that is younger than this as it is.
_SETTLED_NS = 2_000_000_000


def cache_root() -> Path:
    """Return OPTIMUM_NEURON_CACHE, or else a folder in the Hub's home; it need not exist."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path(huggingface_hub.constants.HF_HOME) / "optimum_neuron")


def cache_folder(kind: str) -> Path:
    """Return a folder below `cache_root` that is kept between runs, made if need be.

    Its contents run as native code, or are trusted: another user's, or one that others may write to, is a PermissionError.
    """
    root = cache_root()
    for folder in (root, root / kind):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"the compile cache {folder} cannot be made ({error.strerror}); set {CACHE_VARIABLE} to a folder of your own"
            ) from error
        problem = untrusted(folder.stat())
        if problem:
            raise PermissionError(
                f"the compile cache {folder} {problem}, and this process would run what it holds; set {CACHE_VARIABLE} to "
                f"a folder that only you can write to, or make this one so if you trust its files"
            )
    return root / kind


def untrusted(status: os.stat_result) -> str | None:
    """Return why a file or folder is not to be trusted, or None."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode):
        return "is a link, which may lead out of the cache"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be changed by other users"
    return None


def read_verified(descriptor: int, read: Callable[[], mmap], expected: str) -> tuple[mmap, str]:
    """Return all of an open file, by `read`, and its hex digest, computed only where no record says that it is the expected one.

    The file is on a file system that gives a written file a new ctime (`filesystem.is_local`).
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
    return cache_folder(VERIFIED_KIND) / f"{status.st_dev:x}-{status.st_ino:x}.json"


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
        replace_file(path, json.dumps(record), mode=0o600)
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
