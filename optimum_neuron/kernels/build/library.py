# SPDX-License-Identifier: Apache-2.0
"""The library of the kernels, called through ctypes: the wheel's own, or else one built here and kept in the compile cache.

It knows nothing of torch, so one build serves every version of it.
"""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache
from pathlib import Path

from ... import progress
from ...targets.cache.entries import About
from ...targets.cache.store import CompileCache
from . import native_build
from .host import InstructionSet, instruction_set


CACHE_KIND = "kernels"
INTERFACE = 10  # step_interface() of native/plan.cpp


@cache
def load() -> ctypes.CDLL:
    """The kernels for this process's instruction set, built if need be.

    Raises:
        RuntimeError: they cannot be built.
        ValueError: OPTIMUM_NEURON_CPU names what this machine lacks.
    """
    chosen = instruction_set()
    prebuilt = native_build.PREBUILT / native_build.prebuilt_name(chosen)
    library = ctypes.CDLL(str(prebuilt)) if prebuilt.is_file() else _from_sources(chosen)
    library.step_interface.restype = ctypes.c_int64
    found = library.step_interface()
    if found != INTERFACE:
        raise RuntimeError(
            f"the kernels have the interface {found}, and this version calls {INTERFACE}; install it again"
        )
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.step_plan.argtypes, library.step_plan.restype = [pointer, number], pointer
    library.step_free.argtypes, library.step_free.restype = [pointer], None
    library.step_run.argtypes = [pointer, number, number, pointer, number, number]
    library.step_run.restype = number
    return library


def _from_sources(chosen: InstructionSet) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(fetch(Path(folder), chosen)))


def fetch(folder: Path, chosen: InstructionSet) -> Path:
    """Puts the library into a folder, from the cache or, for the first time, from its sources.

    Raises:
        RuntimeError: it cannot be built.
    """
    path = folder / "kernels.so"
    store, key = CompileCache(CACHE_KIND), native_build.key(chosen)
    if not store.fetch(key, folder, path.stem, path.suffix):
        native_build.check_compiler()
        title, count = f"Compiling kernels for {chosen.name}", len(native_build.source_files())
        with store.scratch() as scratch, progress.stage(title, count) as advance:
            native_build.build(scratch / path.name, chosen, compiled=advance)
            about = About("kernels", chosen.name, Path(native_build.compiler() or "").name)
            store.store(key, scratch, path.stem, folder, about)
    return path
