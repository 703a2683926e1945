# SPDX-License-Identifier: Apache-2.0
"""Files and folders: swapped in one step, synced, hashed, and checked for where they lie; and errors of a full disk."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

from .. import progress


_PIECE = 4 << 20
# A larger file may take a second or more, which is shown.
_LONG = 256 << 20
# More than compiled graphs and tokenizer files take.
_MARGIN = 64 << 20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# A C library, kernel or file system without it (NFS has none), and sandboxes that forbid what they do not know.
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
_MOUNTS = Path("/proc/self/mountinfo")
# linux/magic.h: ext2 to ext4, XFS, Btrfs, F2FS, tmpfs, overlayfs; and ZFS, bcachefs.
_LOCAL = (0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x794C7630, 0x2FC12FC1, 0xCA451A4E)
_STATFS_LONGS = 32  # at least what struct statfs takes


def exchange(left: Path, right: Path) -> bool:
    """Swap the names of two paths in one step; return False, and do nothing, where the system cannot."""
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
    """Open a file to read it, without waiting for a pipe; raise OSError for one that is not regular, or cannot be opened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file; remove it")
    return os.fdopen(descriptor, "rb")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot do it for folders
            raise
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str, mode: int | None = None) -> None:
    """Write a text file, whole or not at all: a reader meanwhile has the one before. The file replaces a link.

    Without `mode` it has the permissions of the one before, or the usual ones.
    """
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(unfinished, _file_mode(path) if mode is None else mode)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


def _file_mode(path: Path) -> int:
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def is_local(descriptor: int) -> bool:
    """Return whether only this machine's kernel, a Linux, changes an open file, and gives it a new ctime with each write."""
    if sys.platform != "linux":
        return False
    libc, status = ctypes.CDLL(None), (ctypes.c_long * _STATFS_LONGS)()
    return libc.fstatfs(descriptor, status) == 0 and status[0] & 0xFFFFFFFF in _LOCAL


def is_mount_point(folder: Path) -> bool:
    """Return whether something is mounted at a real path, be it a folder of the same file system."""
    if os.path.ismount(folder):
        return True
    if not _MOUNTS.is_file():
        return False
    # A blank, tab, line feed or backslash of a path is written in octal.
    name = os.fsencode(folder)
    for code in (b"\\", b" ", b"\t", b"\n"):
        name = name.replace(code, b"\\%03o" % ord(code))
    return any(line.split(b" ")[4] == name for line in _MOUNTS.read_bytes().splitlines())


def check_disk(folder: Path, needed: int) -> None:
    """Raise OSError where a folder's disk has less than so many bytes free, and a margin for small files next to them."""
    free = shutil.disk_usage(folder).free
    if free < needed + _MARGIN:
        raise OSError(
            f"the artifact needs about {(needed + _MARGIN) / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free; free some space "
            f"or name another folder"
        )


@contextmanager
def explained_full_disk(folder: Path, remedy: str) -> Iterator[None]:
    """Replace an OSError about a full disk by one sentence that names the folder and ends with `remedy`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # Without a number: the text of an OSError that has one is not its message alone.
        raise OSError(f"no space is left on the disk of {folder}; free some, or {remedy}") from error


def file_sha256(path: Path) -> str:
    """Return the hex digest of a file, which is read in pieces."""
    size = path.stat().st_size
    shown = progress.stage("Hashing", size) if size >= _LONG else nullcontext(None)
    digest = hashlib.sha256()
    with path.open("rb") as file, shown as advance:
        while piece := file.read(_PIECE):
            digest.update(piece)
            if advance is not None:
                advance(path.name, len(piece))
    return digest.hexdigest()
