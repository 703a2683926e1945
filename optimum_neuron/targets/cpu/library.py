# SPDX-License-Identifier: Apache-2.0
"""The library of the kernels: built from C++ for one instruction set, kept in the compile cache, called through ctypes.

It knows nothing of torch, so one build serves every version of it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path

from ... import progress
from ..cache import CompileCache
from ..processes import Processes, run_jobs
from .host import InstructionSet, instruction_set


SOURCES = Path(__file__).with_name("native")
CACHE_KIND = "kernels"
INTERFACE = 1  # step_interface() of native/plan.cpp
# Products and sums are contracted where a kernel says so, and nowhere else: elsewhere bits would depend on a loop's tail.
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-pthread")


def compiler() -> str | None:
    """The C++ compiler: the variable CXX, or the system's."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def check_compiler() -> None:
    """Raises RuntimeError where there is no C++ compiler, and no library that was built before."""
    if compiler() is None:
        raise RuntimeError(
            "the cpu target compiles its kernels once, and found no g++ or clang++; install one (apt-get install g++), or name "
            "it in the environment variable CXX"
        )


@cache
def load() -> ctypes.CDLL:
    """The kernels for this process's instruction set, built if need be.

    Raises:
        RuntimeError: they cannot be built.
        ValueError: OPTIMUM_NEURON_CPU names what this machine lacks.
    """
    chosen = instruction_set()
    store = CompileCache(CACHE_KIND)
    key = _key(chosen)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernels.so")
        if not store.fetch(key, path.parent, path.stem, path.suffix):
            check_compiler()
            with store.scratch() as scratch, progress.stage(f"Compiling kernels for {chosen.name}"):
                build(scratch / path.name, chosen)
                store.store(key, scratch, path.stem, path.parent)
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
    library.step_run.argtypes, library.step_run.restype = [pointer, number, number, pointer, number], number
    return library


def build(output: Path, chosen: InstructionSet) -> None:
    """Compiles the library.

    Raises:
        RuntimeError: the compiler failed; its message is included.
    """
    sources = sorted(SOURCES.glob("*.cpp"))
    command = [str(compiler()), *_FLAGS, *chosen.flags]
    processes = Processes()
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        objects = {source: str(Path(scratch, source.stem + ".o")) for source in sources}
        compilations = [
            partial(_run, processes, [*command, "-c", str(source), "-o", target]) for source, target in objects.items()
        ]
        run_jobs(compilations, os.cpu_count() or 1, processes.end)
        strict = [] if sys.platform == "darwin" else ["-Wl,--no-undefined"]  # found here, not where it is loaded
        _run(processes, [*command, *objects.values(), "-shared", *strict, "-o", str(output)])


def _run(processes: Processes, command: list[str]) -> None:
    with processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed on the CPU kernels:\n{output.strip()[-2000:]}")


def _key(chosen: InstructionSet) -> str:
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(SOURCES.iterdir())}
    facts = [files, sys.platform, chosen.name, chosen.flags, _FLAGS]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
