# SPDX-License-Identifier: Apache-2.0
"""The worker threads that GNU's OpenMP keeps for every thread that has computed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path


_MAPS = Path("/proc/self/maps")
_OMP_PAUSE_SOFT = 1  # OpenMP 5.0, section 3.2.43


def end_idle_workers() -> None:
    """Ends those of the calling thread, which gets new ones when it computes again, in some 0.1 ms.

    With more workers than cores in a process, none of them waits awake for the next layer: a service whose thread computes
    after the main thread has would take more than twice as long for a step.
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
    os.register_at_fork(before=lambda: _end_workers(_find_libraries()))
