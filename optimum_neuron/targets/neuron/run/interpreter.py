# SPDX-License-Identifier: Apache-2.0
"""The Python of the ranks' processes: this one, or that of an option or a variable. It describes itself before a rank starts."""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....kernels.host.processes import Processes, TiedProcess
from ..rank import __file__ as _rank_init
from ..rank.packages import RUNTIME_PACKAGES
from ..sdk.stacks import InstalledRuntimes


PYTHON_VARIABLE = "OPTIMUM_NEURON_RANK_PYTHON"
RANK_FOLDER = Path(_rank_init).parent
OLDEST_PYTHON = (3, 10)
_VERSION = re.compile(r"(\d+)\.(\d+)")
_ANSWERED = {"python", "numpy", "numpy_problem", "torch", "packages"}
_PACKAGES = {each.distribution for each in RUNTIME_PACKAGES}
_ANSWER_TIMEOUT = 120.0  # seconds; importing numpy from a cold disk takes some
_LARGEST_ANSWER = 1 << 20  # bytes; an answer takes some hundred, and its packages may warn
_INSTEAD = "name the Python of an environment that has numpy and a Neuron runtime"
# Of this interpreter: another one has packages of its own.
_OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "__PYVENV_LAUNCHER__")


@dataclass(frozen=True)
class Interpreter:
    """An interpreter that can hold a rank; `own` says that it is this process's."""

    path: str
    own: bool
    found: InstalledRuntimes

    def command(self, *arguments: str) -> list[str]:
        """Return the command that starts the rank's side in it."""
        return _make_command(self.path, *arguments)

    def environment(self) -> dict[str, str]:
        """Return the variables that it inherits."""
        return _read_environment(self.own)


def find_interpreter(named: str | None) -> Interpreter:
    """Return the interpreter of an option, of the variable, or this one; raise RuntimeError where it cannot hold a rank."""
    variable = os.environ.get(PYTHON_VARIABLE) or None
    option, path = (PYTHON_VARIABLE, variable) if named is None else ("rank_python", named)
    where = f"this Python ({sys.executable})" if path is None else f"{option}={path}"
    own, program = path is None, shutil.which(sys.executable if path is None else path)
    if program is None:
        raise RuntimeError(f"{where}: there is no such program; {_INSTEAD}")
    path = program
    answer = _probe_interpreter(where, path, own)
    python = str(answer["python"])
    if answer["numpy"] is None:
        raise RuntimeError(
            f"{where} is Python {python} without a numpy that works ({answer['numpy_problem']}), and a rank needs one; "
            f"install it there: {path} -m pip install numpy"
        )
    return Interpreter(path, own, InstalledRuntimes(python, answer["torch"], answer["packages"]))


def _probe_interpreter(where: str, path: str, own: bool) -> dict[str, Any]:
    """Return an interpreter's description of itself."""
    with Processes().start(
        _make_command(path, "probe"),
        env=_read_environment(own),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        output, errors = _read_to_end(where, process)
    lines = output.decode("utf-8", errors="replace").strip().splitlines()
    if process.returncode != 0:
        said = errors.decode("utf-8", errors="replace").strip().splitlines()[-1:] or lines[-1:] or ["it said nothing"]
        raise RuntimeError(f"{where} ended with status {process.returncode} ({said[0][:300]}); {_INSTEAD}")
    nonsense = RuntimeError(f"{where} answered {''.join(lines)[:80]!r}, as no Python does; {_INSTEAD}")
    try:
        answer = json.loads(lines[-1] if lines else "")
        python = answer["python"]
        version = _VERSION.match(python)
    except (ValueError, TypeError, KeyError):
        raise nonsense from None
    if version is None:
        raise nonsense
    if tuple(map(int, version.groups())) < OLDEST_PYTHON:  # which answers nothing else
        least = ".".join(map(str, OLDEST_PYTHON))
        raise RuntimeError(f"{where} is Python {python}, and a rank needs {least} or later; {_INSTEAD}")
    packages = answer.get("packages")
    if answer.keys() != _ANSWERED or not isinstance(packages, dict) or packages.keys() != _PACKAGES:
        raise nonsense
    return answer


def _read_to_end(where: str, process: TiedProcess) -> tuple[bytes, bytes]:
    """Return a process's output and errors, whole; raise RuntimeError where they come too late or are too long."""
    late = RuntimeError(f"{where} did not say within {_ANSWER_TIMEOUT:.0f} s what it has; {_INSTEAD}")
    deadline = time.monotonic() + _ANSWER_TIMEOUT
    assert process.stdout is not None and process.stderr is not None
    with process.stdout as output, process.stderr as errors, selectors.DefaultSelector() as selector:
        written = {stream.fileno(): bytearray() for stream in (output, errors)}
        for number in written:
            selector.register(number, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(deadline - time.monotonic())
            if time.monotonic() > deadline:
                raise late
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                if not part:
                    selector.unregister(key.fd)
                written[key.fd] += part
                if len(written[key.fd]) > _LARGEST_ANSWER:
                    raise RuntimeError(
                        f"{where} wrote more than {_LARGEST_ANSWER} bytes, as no Python does; {_INSTEAD}"
                    )
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise late from None
    said, complained = map(bytes, written.values())
    return said, complained


def _make_command(path: str, *arguments: str) -> list[str]:
    # Without byte code: another version's does not belong into this package's folder.
    return [path, "-B", str(RANK_FOLDER), *arguments]


def _read_environment(own: bool) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if own or name not in _OWN_VARIABLES}
