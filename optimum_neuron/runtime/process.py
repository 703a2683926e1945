# SPDX-License-Identifier: Apache-2.0
"""The process that owns threads and devices, which a fork does not bring along, and OpenMP's idle workers."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path


_forks = 0  # from the first process of this program down to this one


def _count_fork() -> None:
    global _forks
    _forks += 1


class OwnProcess:
    """The process in which it was made. A check costs no system call, so a token can make one."""

    def __init__(self) -> None:
        self._forks = _forks

    @property
    def is_here(self) -> bool:
        return self._forks == _forks

    def check_fork(self) -> None:
        """Raise RuntimeError in a process that was forked since: there, a computation or a wait would never end."""
        if not self.is_here:
            raise RuntimeError(
                "the model was loaded before this process was forked, and a fork brings along neither threads nor devices; "
                "load the model in this process, or start processes by multiprocessing's method 'spawn'"
            )


_MAPS = Path("/proc/self/maps")
_OMP_PAUSE_SOFT = 1  # OpenMP 5.0, section 3.2.43


def end_idle_workers() -> None:
    """End the idle workers of the calling thread, which gets new ones when it computes again, in some 0.1 ms.

    With more workers than cores in a process, none of them waits awake for the next layer. A service's thread that computes
    after the main thread would take more than twice as long for a step.
    """
    _end_workers(_libraries())


def _end_workers(libraries: Iterable[ctypes.CDLL]) -> None:
    for library in libraries:
        library.omp_pause_resource_all(_OMP_PAUSE_SOFT)


def _find_libraries() -> tuple[ctypes.CDLL, ...]:
    """Every libgomp of this process that can: torch's own, and that of compiled graphs where it is another one.

    One before GCC 9 cannot, and keeps its workers.
    """
    if not _MAPS.is_file():
        return ()
    lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    paths = sorted({line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line and ".so" in line})
    loaded = [ctypes.CDLL(path) for path in paths if Path(path).is_file()]
    return tuple(library for library in loaded if hasattr(library, "omp_pause_resource_all"))


_libraries = cache(_find_libraries)

if hasattr(os, "register_at_fork"):
    # A child's first computation would wait for ever for workers that a fork does not bring along.
    os.register_at_fork(before=lambda: _end_workers(_find_libraries()), after_in_child=_count_fork)
