# SPDX-License-Identifier: Apache-2.0
"""Folders for unfinished work, each locked by its worker: a free lock shows that the work of a killed process is left.

The lock is flock's, on a file in the folder. The system frees it however a process ends. It holds between containers and, over NFS,
between machines, where process ids say nothing.
"""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


LOCK_NAME = "lock"


@contextmanager
def locked_folder(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a folder, made if need be; at the end it is removed if nothing but its lock is left in it.

    Raises BlockingIOError, or waits, if another process or thread holds it; OSError if its file system has no locks.
    """
    lock = _lock_folder(folder, wait)
    try:
        yield
    finally:
        # Whoever waits for this very file sees that it has gone, and starts again with a new one.
        (folder / LOCK_NAME).unlink(missing_ok=True)
        os.close(lock)
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def partial_folder(parent: Path, stem: str) -> Iterator[Path]:
    """Yield a new folder `parent/.<stem>.partial-<random>`, and remove it at the end; remove those of killed processes first."""
    parent.mkdir(parents=True, exist_ok=True)
    for abandoned in parent.glob(f".{glob.escape(stem)}.partial-*"):
        with suppress(BlockingIOError), locked_folder(abandoned):
            clear_folder(abandoned)
    folder = parent / f".{stem}.partial-{secrets.token_hex(8)}"
    # Before it is locked, another process may take it for abandoned: that one removes it, and it is made again.
    with locked_folder(folder, wait=True):
        try:
            yield folder
        finally:
            clear_folder(folder)


def clear_folder(folder: Path) -> None:
    """Remove the contents of a locked folder except its lock, as far as that is possible."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != LOCK_NAME:
            entry.unlink(missing_ok=True)


def _lock_folder(folder: Path, wait: bool) -> int:
    """Return the descriptor of the folder's locked lock file."""
    path = folder / LOCK_NAME
    while True:
        try:
            folder.mkdir(exist_ok=True)
            # Writable, which flock over NFS asks for.
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # its last holder has just removed the folder
        except FileExistsError:
            if folder.is_file():
                raise
            continue  # the same, after mkdir found it and before it looked what it is
        try:
            _lock_file(lock, folder, wait)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(path)):
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _lock_file(lock: int, folder: Path, wait: bool) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        raise OSError(
            f"the file system of {folder} has no locks ({os.strerror(error.errno or 0)}), which keep two processes from "
            f"writing there at once; name a folder on another one, or mount it with locks"
        ) from error
