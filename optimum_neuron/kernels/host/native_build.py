# SPDX-License-Identifier: Apache-2.0
"""The library of the kernels: built from C++ for one instruction set, and called through ctypes.

It imports nothing outside of Python's own library: the build of a wheel runs it before anything is installed. The library knows nothing
of torch, so one build serves every version of it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from .instruction_sets import InstructionSet, choose_instruction_set
from .machine import usable_cpus
from .processes import Processes, run_jobs


SOURCES = Path(__file__).parents[1] / "native"
INTERFACE = 12  # step_interface() of native/plan/plan.cpp
PREBUILT = Path(__file__).parents[1] / "prebuilt"
# Products and sums are contracted where a kernel says so, and nowhere else: elsewhere bits would depend on a loop's tail.
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-pthread")
# What makes a library run on machines that do not have this compiler's own libraries, and shows others nothing of them.
PORTABLE = {
    "linux": ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-Wl,-s"),
    "darwin": ("-Wl,-x",),
}


def _read_compiler_words() -> list[str]:
    """Return a program and its arguments, as in CXX="ccache g++" and CXX="g++ -O3"."""
    return os.environ.get("CXX", "").split() or ["clang++" if sys.platform == "darwin" else "g++"]


def find_compiler() -> str | None:
    """Return the C++ compiler: the first word of the variable CXX, or the system's."""
    return shutil.which(_read_compiler_words()[0])


def check_compiler() -> None:
    """Raise RuntimeError where there is no C++ compiler."""
    if find_compiler() is None:
        named = f" (now {os.environ['CXX']!r}, which is no program here)" if os.environ.get("CXX") else ""
        raise RuntimeError(
            "this installation has no kernels built from its sources, and found no g++ or clang++ to build them; install "
            f"one (apt-get install g++), or name it in the environment variable CXX{named}, or install a wheel made for this machine"
        )


def digest_sources(chosen: InstructionSet) -> str:
    """Return a digest of all that decides what a library computes, but for the compiler."""
    paths = sorted(SOURCES.rglob("*.*"))
    files = {each.relative_to(SOURCES).as_posix(): hashlib.sha256(each.read_bytes()).hexdigest() for each in paths}
    facts = [files, sys.platform, platform.machine(), chosen.name, chosen.flags, _FLAGS]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def name_prebuilt(chosen: InstructionSet) -> str:
    """Return the name of a wheel's library. It has the digest, so that other sources never find it."""
    return f"{chosen.name}-{digest_sources(chosen)}.so"


def find_prebuilt(chosen: InstructionSet) -> Path | None:
    """Return the library that the wheel has, if it has one."""
    path = PREBUILT / name_prebuilt(chosen)
    return path if path.is_file() else None


def list_sources() -> list[Path]:
    """List the files that are compiled, each by itself."""
    return sorted(SOURCES.rglob("*.cpp"))


def build(
    output: Path,
    chosen: InstructionSet,
    link_flags: Sequence[str] = (),
    compiled: Callable[[str], None] = lambda name: None,
) -> None:
    """Compile the library; `compiled` gets each source file that is done, in threads of its own.

    Raises:
        RuntimeError: there is no compiler, or it failed; then its message is included.
    """
    check_compiler()
    command = [str(find_compiler()), *_read_compiler_words()[1:], *_FLAGS, *chosen.flags, f"-I{SOURCES}"]
    processes = Processes()
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        objects = {source: str(Path(scratch, source.stem + ".o")) for source in list_sources()}

        def compile_one(source: Path) -> None:
            _run_command(processes, [*command, "-c", str(source), "-o", objects[source]])
            compiled(source.name)

        run_jobs([partial(compile_one, source) for source in objects], usable_cpus(), processes.end)
        strict = [] if sys.platform == "darwin" else ["-Wl,--no-undefined"]  # found here, not where it is loaded
        _run_command(processes, [*command, *objects.values(), "-shared", *strict, *link_flags, "-o", str(output)])


def _run_command(processes: Processes, command: list[str]) -> None:
    with processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed on the CPU kernels:\n{output.strip()[-2000:]}")


def load_library(fetch: Callable[[Path, InstructionSet], object] = build) -> ctypes.CDLL:
    """Return the kernels for this machine's instruction set; `fetch` makes the file of the library where the wheel has none.

    Raises:
        RuntimeError: the library cannot be built, or belongs to another version.
        ValueError: OPTIMUM_NEURON_CPU names an instruction set that this machine lacks.
    """
    chosen = choose_instruction_set()
    prebuilt = find_prebuilt(chosen)
    if prebuilt is not None:
        return _load_file(prebuilt)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernels.so")
        fetch(path, chosen)
        return _load_file(path)


def _load_file(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.step_interface.restype = ctypes.c_int64
    found = library.step_interface()
    if found != INTERFACE:
        differ = f"the kernels have the interface {found}, and this version calls {INTERFACE}"
        raise RuntimeError(f"{differ}; install it again")
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.step_plan.argtypes, library.step_plan.restype = [pointer, number], pointer
    library.step_free.argtypes, library.step_free.restype = [pointer], None
    library.step_run.argtypes = [pointer, number, number, pointer, number, number]
    library.step_run.restype = number
    return library
