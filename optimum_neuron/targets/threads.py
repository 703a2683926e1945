# SPDX-License-Identifier: Apache-2.0
"""Threads that compute on the host: no more than this process may use, where torch takes what the machine has."""

from __future__ import annotations

import logging
import os
import sys
from functools import cache

from ..kernels.host.machine import allowed_cpus, count_threads, physical_cores, usable_cores


logger = logging.getLogger(__name__)

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def count_fitted() -> int:
    """Return how many threads compute, which no torch that was imported meanwhile makes more than fit."""
    if "torch" in sys.modules:
        fit_threads()
    return count_threads()


@cache
def fit_threads() -> None:
    """Lower torch's number of threads to the cores that this process may use, once per process.

    What was chosen stays: by a variable, or by torch.set_num_threads, which shows by a number that is not torch's own, or
    that is set later.
    """
    import torch

    found, usable = torch.get_num_threads(), usable_cores()
    # What torch, MKL and OpenMP take by default: all CPUs or cores, of the machine or of the affinity.
    defaults = {take(cpus) for take in (len, physical_cores) for cpus in (allowed_cpus(), range(os.cpu_count() or 1))}
    if found <= usable or any(os.environ.get(name) for name in VARIABLES) or found not in defaults:
        return
    torch.set_num_threads(usable)
    reason = "this process may use no more cores; OMP_NUM_THREADS sets another number"
    logger.info("computing with %d threads, not %d: %s", usable, found, reason)
