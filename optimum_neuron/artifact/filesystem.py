# SPDX-License-Identifier: Apache-2.0
"""What is asked of a file system: to swap two folders in one step, to keep what is written, to tell of changes, to name a full disk."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# A C library, kernel or file system without it (NFS has none), and sandboxes that forbid what they do not know.
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
_MOUNTS = Path("/proc/self/mountinfo")
# As in linux/magic.h: ext2 to ext4, XFS, Btrfs, F2FS, tmpfs, overlayfs; and ZFS, bcachefs.
_LOCAL = (0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x794C7630, 0x2FC12FC1, 0xCA451A4E)
_STATFS_LONGS = 32  # at least what struct statfs takes


def exchange(left: Path, right: Path) -> bool:
    """Swaps what two paths name, so that at no time either names nothing; False, and nothing is done, where that is not to be had.

    Raises:
        OSError: one of them is not there, or may not be moved.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    paths = [ctypes.c_char_p(os.fsencode(path)) for path in (left, right)]
    status = libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], ctypes.c_uint(_RENAME_EXCHANGE))
    number = ctypes.get_errno()
    if status != 0 and number not in _UNSUPPORTED:
        raise OSError(number, os.strerror(number), str(left), None, str(right))
    return status == 0


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read it; one that is none, such as a pipe that nothing writes to, is not waited for.

    Raises:
        OSError: it is no regular file, or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file; remove it")
    return os.fdopen(descriptor, "rb")


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, would survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot do it for folders
            raise
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all: who reads it meanwhile has the one before. A link there is replaced by the file."""
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(unfinished, _mode(path))
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def is_local(descriptor: int) -> bool:
    """Whether an open file changes through this machine's kernel alone, which gives it a new ctime whenever it is written to.

    False where that is not known: network file systems, FUSE, and other systems than Linux.
    """
    if sys.platform != "linux":
        return False
    libc, status = ctypes.CDLL(None), (ctypes.c_long * _STATFS_LONGS)()
    return libc.fstatfs(descriptor, status) == 0 and status[0] & 0xFFFFFFFF in _LOCAL


def is_mount_point(folder: Path) -> bool:
    """Whether something is mounted at a real path, be it a folder of the same file system."""
    if os.path.ismount(folder):
        return True
    if not _MOUNTS.is_file():
        return False
    # A blank, tab, line feed or backslash of a path is written in octal.
    name = os.fsencode(folder)
    for code in (b"\\", b" ", b"\t", b"\n"):
        name = name.replace(code, b"\\%03o" % ord(code))
    return any(line.split(b" ")[4] == name for line in _MOUNTS.read_bytes().splitlines())


@contextmanager
def explained_full_disk(folder: Path, remedy: str) -> Iterator[None]:
    """Raises an OSError about a full disk again as one sentence that names the folder and ends with `remedy`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # Without a number: the text of an OSError that has one is not its message alone.
        raise OSError(f"no space is left on the disk of {folder}; free some, or {remedy}") from error
