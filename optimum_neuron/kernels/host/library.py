# SPDX-License-Identifier: Apache-2.0
"""The library of the kernels, called through ctypes: the wheel's own, or else one built here.

It knows nothing of torch, so one build serves every version of it.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from pathlib import Path

from . import native_build
from .instruction_sets import InstructionSet, choose_instruction_set


INTERFACE = 10  # step_interface() of native/plan/plan.cpp


def build_library(folder: Path, chosen: InstructionSet) -> Path:
    """Build the library in a folder, and return its path.

    Raises:
        RuntimeError: it cannot be built.
    """
    path = folder / "kernels.so"
    native_build.build(path, chosen)
    return path


def load_library(fetch: Callable[[Path, InstructionSet], Path] = build_library) -> ctypes.CDLL:
    """Return the kernels for this machine's instruction set.

    Args:
        fetch: puts the library into a folder where the wheel has none, and returns its path.

    Raises:
        RuntimeError: the library cannot be built, or belongs to another version.
        ValueError: OPTIMUM_NEURON_CPU names an instruction set that this machine lacks.
    """
    chosen = choose_instruction_set()
    prebuilt = native_build.PREBUILT / native_build.name_prebuilt(chosen)
    if prebuilt.is_file():
        return _load_file(prebuilt)
    with tempfile.TemporaryDirectory() as folder:
        return _load_file(fetch(Path(folder), chosen))


def _load_file(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
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
