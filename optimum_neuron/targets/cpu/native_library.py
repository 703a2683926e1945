# SPDX-License-Identifier: Apache-2.0
"""The library of the kernels, through the compile cache."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from ... import progress
from ...kernels.host import native_build
from ...kernels.host.instruction_sets import InstructionSet
from ..cache.entries import About
from ..cache.store import CompileCache


CACHE_KIND = "kernels"


@cache
def load_kernels() -> ctypes.CDLL:
    """Return the kernels of this process: the wheel's, or those of the cache, which are built at first.

    Raises:
        RuntimeError: they cannot be built.
        ValueError: OPTIMUM_NEURON_CPU names an instruction set that this machine lacks.
    """
    return native_build.load_library(fetch_library)


def fetch_library(path: Path, chosen: InstructionSet) -> Path:
    """Make the file of the library, from the cache or from its sources, and return its path."""
    store, key = CompileCache(CACHE_KIND), native_build.digest_sources(chosen)
    if not store.fetch(key, path.parent, path.stem, path.suffix):
        native_build.check_compiler()
        title, count = f"Compiling kernels for {chosen.name}", len(native_build.list_sources())
        with store.scratch() as scratch, progress.stage(title, count) as advance:
            native_build.build(scratch / path.name, chosen, compiled=advance)
            about = About("kernels", chosen.name, Path(native_build.find_compiler() or "").name)
            store.store(key, scratch, path.stem, path.parent, about)
    return path
