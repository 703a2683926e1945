# SPDX-License-Identifier: Apache-2.0
"""Memory in pages as large as the system has them: fewer TLB misses when every weight is read each step."""

from __future__ import annotations

import math
import mmap
import os
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch


_HUGE_PAGE = 2 << 20
# How much of a mapping is in huge pages where it counts as being so: never all, for a file ends within one.
_MOST = 0.75
# How much of a file is looked at, and read anew, at a time; and for how long in all.
_PIECE = 64 << 20
_LONGEST_S = 3.0
_MAPPINGS = Path("/proc/self/smaps")


def zeroed(size: int) -> mmap.mmap:
    """At least one byte of private memory: what processes share is not to be had in huge pages."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _prefer_huge_pages(memory)
    return memory


def touch(tensor: torch.Tensor) -> None:
    """Have the system give all pages of a contiguous tensor's memory, whose values stay."""
    tensor.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].add_(0)


def never_filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory, and that nobody can write to: the process that does is ended by the system."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch tells that the memory cannot be written to
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def copied(file: BinaryIO, size: int) -> mmap.mmap:
    """The first `size` bytes of a file that was just opened; zeros where it has fewer."""
    memory = zeroed(size)
    file.readinto(memoryview(memory)[:size])  # type: ignore[attr-defined]
    return memory


def mapped(descriptor: int, size: int, offset: int = 0) -> mmap.mmap:
    """The bytes of a file, as the system caches them; what is written to them stays in this process."""
    memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY, offset=offset)
    _prefer_huge_pages(memory)
    return memory


def has_huge_pages(memory: mmap.mmap) -> bool:
    """Whether the system maps most of a file as huge pages; many file systems of many kernels cache in small ones only."""
    view = memoryview(memory)
    for start in range(0, len(view), _HUGE_PAGE):
        view[start]  # is mapped by being read
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    try:
        return _huge_bytes(address) >= _MOST * len(view)
    except OSError:
        return False


def read_anew(descriptor: int, size: int) -> None:
    """Has the system cache a file in huge pages, if it can: what was written, or read in small pieces, it has in small ones.

    Forgets what is in small pages and reads it from the disk again, piece by piece, until one does not come in huge pages, or some
    seconds are over: a file may be larger than the memory. What another process has mapped, or the disk lacks yet, stays as it is.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    end = time.monotonic() + _LONGEST_S
    for begin in range(0, size - _HUGE_PAGE + 1, _PIECE):
        length = min(_PIECE, size - begin)
        if not _is_huge(descriptor, length, begin):
            with suppress(OSError):  # a file system that takes no advice
                os.posix_fadvise(descriptor, begin, length, os.POSIX_FADV_DONTNEED)
            if not _is_huge(descriptor, length, begin):
                return
        if time.monotonic() > end:
            return


def _is_huge(descriptor: int, size: int, offset: int) -> bool:
    with mapped(descriptor, size, offset) as memory:
        return has_huge_pages(memory)


def _huge_bytes(address: int) -> int:
    """Of a mapped file at an address, as the system counts them."""
    inside = False
    with _MAPPINGS.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, *values = line.split()
            if not name.endswith(":"):  # the head of a mapping
                begin, end = (int(bound, 16) for bound in name.split("-"))
                inside = begin <= address < end
            elif inside and name == "FilePmdMapped:":
                return int(values[0]) * 1024
    return 0


def _prefer_huge_pages(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
