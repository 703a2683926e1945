# SPDX-License-Identifier: Apache-2.0
"""The library of the kernels, through the compile cache."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import Future
from functools import cache
from pathlib import Path

from ... import progress
from ...kernels.host import native_build
from ...kernels.host.instruction_sets import InstructionSet, choose_instruction_set
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
    loading = _begin_loading()
    try:
        return loading.result()
    finally:
        if loading.done():  # else this thread was interrupted, and whoever calls again waits for the same build
            _begin_loading.cache_clear()


def start_kernels() -> None:
    """Begin to build the kernels in a thread of its own, so that an export need not wait for them; load those that are there at once.

    Raises:
        RuntimeError: they are to be built, and there is no compiler; what is there belongs to another version.
        ValueError, PermissionError: as `load_kernels`; other users may change the cache.
    """
    chosen = choose_instruction_set()
    kept = CompileCache(CACHE_KIND).folder / native_build.digest_sources(chosen)
    if native_build.find_prebuilt(chosen) is not None or kept.is_dir():
        load_kernels()
    elif not load_kernels.cache_info().currsize:
        native_build.check_compiler()
        _begin_loading()


@cache
def _begin_loading() -> Future[ctypes.CDLL]:
    loading: Future[ctypes.CDLL] = Future()

    def load() -> None:
        try:
            loading.set_result(native_build.load_library(fetch_library))
        except BaseException as error:
            loading.set_exception(error)

    # A daemon: a process that ends does not wait for it, and ends its compilers.
    threading.Thread(target=load, name="kernels", daemon=True).start()
    return loading


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
