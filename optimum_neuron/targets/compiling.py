# SPDX-License-Identifier: Apache-2.0
"""What all compiling targets share: the folder of their caches, and how many compilers this machine takes at once."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub.constants


CACHE_VARIABLE = "OPTIMUM_NEURON_CACHE"


def cache_folder() -> Path:
    """Where compiled code is kept between exports; OPTIMUM_NEURON_CACHE overrides the folder in the Hub's home."""
    default = Path(huggingface_hub.constants.HF_HOME) / "optimum_neuron"
    return Path(os.environ.get(CACHE_VARIABLE) or default)


def parallel_jobs(jobs: int, memory_per_job: int) -> int:
    """How many of `jobs` may run at once, by this machine's cores and free memory; at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = _available_memory()
    fitting = cores if memory is None else memory // memory_per_job
    return max(1, min(jobs, cores, fitting))


def _available_memory() -> int | None:
    """Bytes that new processes can use, or None where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
