# SPDX-License-Identifier: Apache-2.0
"""The neuronx-cc command: found, asked for its version and operators, and called on one graph."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ....kernels.host.processes import Processes
from ..graphs.io import HLO_SUFFIX
from ..rank.packages import SETUP, installed_version
from ..sdk.errors import explain_failure
from ..sdk.flags import FLAGS_VARIABLE


COMMAND, DISTRIBUTION = "neuronx-cc", "neuronx-cc"
NEFF_SUFFIX = ".neff"
COMPILER_LOG = "compiler.log"
_NEFF_HEADER_SIZE = 1024  # an archive follows
_VERSION = re.compile(r"\b(\d+\.\d+\.\d+\S*)")
_ANSWER_TIMEOUT = 300  # seconds; importing the compiler takes several


def find_compiler() -> Path:
    """Return the neuronx-cc command, or raise RuntimeError where there is none or a placeholder."""
    problem = missing_compiler()
    if problem is not None:
        raise RuntimeError(problem)
    return Path(shutil.which(COMMAND) or COMMAND)


def missing_compiler() -> str | None:
    """Return why there is no neuronx-cc, with the remedy; None where there is one."""
    if shutil.which(COMMAND) is not None:
        return None
    if installed_version(DISTRIBUTION) is not None:
        return f"{DISTRIBUTION} is installed, but there is no {COMMAND} command: it is a placeholder, or PATH lacks its folder; {SETUP}"
    return f"{COMMAND} is not installed; {SETUP}"


def compiler_arguments(graph: str, target: str, flags: Sequence[str]) -> tuple[str, ...]:
    """Return the call of the compiler, in a folder that holds the graph's HLO: without folders, so the same on every machine."""
    files = (f"--output={graph}{NEFF_SUFFIX}", f"--logfile={COMPILER_LOG}")
    return (COMMAND, "compile", graph + HLO_SUFFIX, "--framework=XLA", f"--target={target}", *files, *flags)


@functools.cache
def compiler_version(compiler: Path) -> str:
    """Return numbers like 2.27.5334.0+f702b353, or raise RuntimeError where `neuronx-cc --version` says none."""
    text = _run_command(compiler, "--version")
    match = _VERSION.search(text)
    if match is None:
        found = text.strip()[:200]
        raise RuntimeError(f"{compiler} --version names no version but {found!r}; install {DISTRIBUTION} again")
    return match.group(1)


@functools.cache
def list_operators(compiler: Path) -> frozenset[str]:
    """Return operators as `neuronx-cc list-operators --framework XLA` spells them, or raise RuntimeError."""
    lines = _run_command(compiler, "list-operators", "--framework", "XLA").splitlines()
    return frozenset(line.strip() for line in lines if line.strip())


def _read_environment() -> dict[str, str]:
    """Return what a compiler inherits: all but options, which it gets as arguments."""
    return {name: value for name, value in os.environ.items() if not name.startswith(FLAGS_VARIABLE)}


def _run_command(compiler: Path, *arguments: str) -> str:
    command = [str(compiler), *arguments]
    environment = _read_environment()
    try:
        answer = subprocess.run(
            command, input="", capture_output=True, text=True, timeout=_ANSWER_TIMEOUT, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{' '.join(command)} failed: {error}; install {DISTRIBUTION} again") from error
    if answer.returncode != 0:
        reason = (answer.stderr or answer.stdout).strip()[-500:]
        raise RuntimeError(f"{' '.join(command)} ended with status {answer.returncode}: {reason}")
    # Releases differ in which of the two streams they answer on.
    return answer.stdout if answer.stdout.strip() else answer.stderr


def run_compiler(processes: Processes, arguments: Sequence[str], folder: Path, timeout: float) -> None:
    """Run one compiler in a folder, where it may leave files, for at most `timeout` seconds.

    Raise RuntimeError where it failed, took too long or wrote no whole NEFF; the message holds the end of its output.
    """
    # Its own, so that nothing stays; not below `folder`: its path may be too long for a socket.
    with (
        tempfile.TemporaryDirectory(prefix="neuronx-cc-", ignore_cleanup_errors=True) as temporary,
        (folder / "output.log").open("wb") as output,
        processes.start(
            [str(find_compiler()), *arguments[1:]],
            cwd=folder,
            env={**_read_environment(), "TMPDIR": temporary},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the compiler did not finish within {timeout:,.0f} s and was ended; lower prefill_chunk_size or "
                f"sequence_length, or raise tensor_parallel_size\n{_read_tail(folder)}"
            ) from None
    if status != 0:
        raise RuntimeError(explain_failure(status, _read_tail(folder)))
    neff = folder / Path(arguments[2]).with_suffix(NEFF_SUFFIX)
    if not neff.is_file():
        raise RuntimeError(f"the compiler reported success, but wrote no {neff.name}; see its log")
    if neff.stat().st_size <= _NEFF_HEADER_SIZE:
        size = neff.stat().st_size
        raise RuntimeError(f"{neff.name} has {size} bytes, fewer than a NEFF's header; the disk may be full")


def _read_tail(folder: Path) -> str:
    """Return the end of what a compiler printed and logged: an NCC code may stand in either."""
    parts = []
    for path in sorted(folder.glob("*.log")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            parts.append(file.read().decode("utf-8", errors="replace").strip())
    return "\n".join(filter(None, parts))
