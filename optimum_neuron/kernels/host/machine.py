# SPDX-License-Identifier: Apache-2.0
"""The CPUs and the memory that this process may use: by its affinity, and by the CPU quotas of control groups (containers).

Files that are missing, or that say something else than expected, limit nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path, PurePosixPath


_ROOT = Path("/")


def allowed_cpus() -> frozenset[int]:
    """Return the numbers of the logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cpus() -> int:
    """Return how many processes can compute at once, at least 1: logical CPUs, within the quota."""
    return _within_quota(len(allowed_cpus()))


def usable_cores() -> int:
    """Return how many threads can compute at once, at least 1: two threads of one core share what the kernels need."""
    return _within_quota(physical_cores(allowed_cpus()))


def count_threads() -> int:
    """Return how many threads compute: torch's number where this process has torch, else OMP_NUM_THREADS, or all usable cores."""
    asked = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return _count_own_threads() if asked is None else asked()


@cache
def _count_own_threads() -> int:
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else usable_cores()


def physical_cores(cpus: Collection[int]) -> int:
    """Return how many cores have at least one of these logical CPUs; an unknown CPU is a core."""
    folder = _ROOT / "sys/devices/system/cpu"
    return len({_text(folder / f"cpu{cpu}/topology/thread_siblings_list").strip() or str(cpu) for cpu in cpus})


def quota() -> int | None:
    """Return the whole CPUs of the smallest quota of this process's control groups; None without quota."""
    quotas = []
    for group in _groups():
        words = _text(group / "cpu.max").split()  # of version 2, or two files of version 1
        if not words:
            words = [_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        with contextlib.suppress(ValueError):  # "max" among others
            time, period = (int(word) for word in words)
            if time >= 0 and period > 0:
                quotas.append(time // period)
    return min(quotas, default=None)


def available_memory() -> int | None:
    """Return the bytes that new processes can use; None where the system does not say."""
    return _meminfo().get("MemAvailable")


def machine_memory() -> int:
    """Return the bytes of memory and swap, or what a process can address where the system does not say."""
    sizes = _meminfo()
    return sizes["MemTotal"] + sizes.get("SwapTotal", 0) if "MemTotal" in sizes else sys.maxsize


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in _text(_ROOT / "proc/meminfo").splitlines())
    return {words[0].removesuffix(":"): int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}


def _within_quota(count: int) -> int:
    limit = quota()
    return max(1, count if limit is None else min(count, limit))


def _groups() -> Iterator[Path]:
    """Yield the folders of this process's control groups that limit the CPU, and of all groups around them."""
    paths: dict[bool, str] = {}  # of this process's group, by whether its hierarchy has version 1
    for line in _text(_ROOT / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        if "cpu" in controllers.split(",") or (number == "0" and not controllers):
            paths[bool(controllers)] = own
    # What is mounted where, as proc(5) has it; hierarchies of version 1 that do not limit the CPU have none of the files that are read.
    for line in _text(_ROOT / "proc/self/mountinfo").splitlines():
        fields, _, kind = (part.split() for part in line.partition(" - "))
        if len(fields) < 5 or kind[:1] not in (["cgroup"], ["cgroup2"]) or (kind[0] == "cgroup") not in paths:
            continue
        mounted, place = (re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), each) for each in fields[3:5])
        path = PurePosixPath(paths[kind[0] == "cgroup"])
        top = group = _ROOT / place.lstrip("/")
        # A container may see its own group as the top, whatever the group is called outside.
        if path.is_relative_to(mounted):
            group = top / path.relative_to(mounted)
        yield group
        while group != top:
            group = group.parent
            yield group


def _text(path: Path) -> str:
    """Return the text of a file; nothing where it cannot be read, or where no file can have such a name."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""
