# SPDX-License-Identifier: Apache-2.0
"""The neuronx-cc command: found, asked for its version and operators, and called on one graph."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..graph_files import HLO_SUFFIX
from ..rank.packages import SETUP, installed_version
from ..sdk.flags import FLAGS_VARIABLE


COMMAND, DISTRIBUTION = "neuronx-cc", "neuronx-cc"
NEFF_SUFFIX = ".neff"
COMPILER_LOG = "compiler.log"
# A NEFF is a header of this size and an archive behind it.
NEFF_HEADER_SIZE = 1024
_VERSION = re.compile(r"\b(\d+\.\d+\.\d+\S*)")
_ANSWER_TIMEOUT = 300  # seconds; importing the compiler takes several


class CompilerCall(NamedTuple):
    """How a graph is compiled, in a folder that holds its HLO.

    Attributes:
        argv: as recorded in the manifest: names without folders, so that it is the same on every machine.
        executable: the program that `argv[0]` names.
    """

    argv: tuple[str, ...]
    executable: str
    environment: dict[str, str]


def check_compiler(target: str) -> None:
    """Raises RuntimeError where this machine cannot compile for a target; the message says what is missing."""
    problem = missing_compiler()
    if problem is not None:
        raise RuntimeError(
            f"compiling for {target} needs the Neuron compiler, on x86 Linux with or without a device: {problem}; or export "
            f"with target='cpu', which runs on this machine"
        )


def compiler_call(graph: str, target: str, flags: Sequence[str]) -> CompilerCall:
    """Compiles `<graph>.hlo` to `<graph>.neff`."""
    argv = (
        COMMAND,
        "compile",
        graph + HLO_SUFFIX,
        "--framework=XLA",
        f"--target={target}",
        f"--output={graph}{NEFF_SUFFIX}",
        f"--logfile={COMPILER_LOG}",
        *flags,
    )
    return CompilerCall(argv, str(find_compiler()), compiler_environment(os.environ))


def find_compiler() -> Path:
    """Return the neuronx-cc command, or raise RuntimeError where there is none or a placeholder."""
    problem = missing_compiler()
    if problem is not None:
        raise RuntimeError(problem)
    return Path(shutil.which(COMMAND) or COMMAND)


def missing_compiler() -> str | None:
    """Why there is no neuronx-cc, with the remedy; None where there is one."""
    if shutil.which(COMMAND) is not None:
        return None
    if installed_version(DISTRIBUTION) is not None:
        return f"{DISTRIBUTION} is installed, but there is no {COMMAND} command: it is a placeholder, or PATH lacks its folder; {SETUP}"
    return f"{COMMAND} is not installed; {SETUP}"


@functools.cache
def compiler_version(compiler: Path) -> str:
    """Return numbers like 2.27.5334.0+f702b353, or raise RuntimeError where `neuronx-cc --version` says none."""
    text = _ask(compiler, "--version")
    match = _VERSION.search(text)
    if match is None:
        raise RuntimeError(
            f"{compiler} --version names no version but {text.strip()[:200]!r}; install {DISTRIBUTION} again"
        )
    return match.group(1)


@functools.cache
def list_operators(compiler: Path) -> frozenset[str]:
    """Return operators as `neuronx-cc list-operators --framework XLA` spells them, or raise RuntimeError."""
    lines = _ask(compiler, "list-operators", "--framework", "XLA").splitlines()
    return frozenset(line.strip() for line in lines if line.strip())


def compiler_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a compiler inherits: all but options, which it gets as arguments."""
    return {name: value for name, value in environment.items() if name != FLAGS_VARIABLE}


def check_neff(path: Path) -> None:
    """Raises RuntimeError where a file is no complete NEFF as far as its size tells."""
    if not path.is_file():
        raise RuntimeError(f"the compiler reported success, but wrote no {path.name}; see its log")
    if path.stat().st_size <= NEFF_HEADER_SIZE:
        raise RuntimeError(
            f"{path.name} has {path.stat().st_size} bytes, fewer than a NEFF's header; the disk may be full"
        )


def _ask(compiler: Path, *arguments: str) -> str:
    command = [str(compiler), *arguments]
    environment = compiler_environment(os.environ)
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_ANSWER_TIMEOUT,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{' '.join(command)} failed: {error}; install {DISTRIBUTION} again") from error
    if answer.returncode != 0:
        reason = (answer.stderr or answer.stdout).strip()[-500:]
        raise RuntimeError(f"{' '.join(command)} ended with status {answer.returncode}: {reason}")
    # Releases differ in which of the two streams they answer on.
    return answer.stdout if answer.stdout.strip() else answer.stderr
