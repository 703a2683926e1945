# SPDX-License-Identifier: Apache-2.0
"""The library of the kernels, built from C++ for one instruction set.

It imports nothing outside of Python's own library: the build of a wheel runs it before anything is installed.
"""

from __future__ import annotations

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

from .instruction_sets import InstructionSet
from .machine import usable_cpus
from .processes import Processes, run_jobs


SOURCES = Path(__file__).parents[1] / "native"
PREBUILT = Path(__file__).parents[1] / "prebuilt"
# Products and sums are contracted where a kernel says so, and nowhere else: elsewhere bits would depend on a loop's tail.
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-pthread")
# What makes a library run on machines that do not have this compiler's own libraries, and shows others nothing of them.
PORTABLE = {
    "linux": ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-Wl,-s"),
    "darwin": ("-Wl,-x",),
}


def find_compiler() -> str | None:
    """Return the C++ compiler: the first word of the variable CXX, or the system's."""
    return shutil.which(_read_compiler_words()[0])


def _read_compiler_words() -> list[str]:
    """Return a program and its arguments, as in CXX="ccache g++" and CXX="g++ -O3"."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    return os.environ.get("CXX", "").split() or [default]


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
    files = {
        path.relative_to(SOURCES).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(SOURCES.rglob("*.*"))
    }
    facts = [files, sys.platform, platform.machine(), chosen.name, chosen.flags, _FLAGS]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def name_prebuilt(chosen: InstructionSet) -> str:
    """Return the name of a wheel's library. It has the digest, so that other sources never find it."""
    return f"{chosen.name}-{digest_sources(chosen)}.so"


def list_sources() -> list[Path]:
    """List the files that are compiled, each by itself."""
    return sorted(SOURCES.rglob("*.cpp"))


def build(
    output: Path,
    chosen: InstructionSet,
    link_flags: Sequence[str] = (),
    compiled: Callable[[str], None] = lambda name: None,
) -> None:
    """Compile the library.

    Args:
        compiled: gets each source file that is done, in threads of its own.

    Raises:
        RuntimeError: there is no compiler, or it failed; then its message is included.
    """
    check_compiler()
    command = [str(find_compiler()), *_read_compiler_words()[1:], *_FLAGS, *chosen.flags, f"-I{SOURCES}"]
    processes = Processes()
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        objects = {source: str(Path(scratch, source.stem + ".o")) for source in list_sources()}

        def compile_one(source: Path, target: str) -> None:
            _run_command(processes, [*command, "-c", str(source), "-o", target])
            compiled(source.name)

        compilations = [partial(compile_one, *pair) for pair in objects.items()]
        run_jobs(compilations, usable_cpus(), processes.end)
        strict = [] if sys.platform == "darwin" else ["-Wl,--no-undefined"]  # found here, not where it is loaded
        _run_command(processes, [*command, *objects.values(), "-shared", *strict, *link_flags, "-o", str(output)])


def _run_command(processes: Processes, command: list[str]) -> None:
    with processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed on the CPU kernels:\n{output.strip()[-2000:]}")
