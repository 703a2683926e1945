# SPDX-License-Identifier: Apache-2.0
"""The process of one rank, or of all, from its parent's side: its interpreter, its start on its cores, commands and its end.

The interpreter is this one, or that of an option or a variable. It describes itself before a rank starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ....kernels.host.processes import Processes, TiedProcess
from ..rank import __file__ as _rank_init
from ..rank.packages import RUNTIME_PACKAGES
from ..rank.plan import RankPlan
from ..rank.wire import Channel, WireError
from ..sdk.errors import NeuronRuntimeError, missing_library, runtime_error
from ..sdk.stacks import InstalledRuntimes


PYTHON_VARIABLE = "OPTIMUM_NEURON_RANK_PYTHON"
RANK_FOLDER = Path(_rank_init).parent
OLDEST_PYTHON = (3, 10)
_ANSWERED = {"python", "numpy", "numpy_problem", "torch", "packages"}
_PACKAGES = {each.distribution for each in RUNTIME_PACKAGES}
_ANSWER_TIMEOUT = 120.0  # seconds; importing numpy from a cold disk takes some
_LARGEST_ANSWER = 1 << 20  # bytes; an answer takes some hundred, and its packages may warn
_INSTEAD = "name the Python of an environment that has numpy and a Neuron runtime"
# Of this interpreter: another one has packages of its own.
_OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "__PYVENV_LAUNCHER__")
# Seconds that a process has to end by itself, which gives its core back in order; a profile is written meanwhile, too.
GRACE, CAPTURE_GRACE = 15.0, 300.0


@dataclass(frozen=True)
class Interpreter:
    """An interpreter that can hold a rank; `own` says that it is this process's."""

    path: str
    own: bool

    def command(self, *arguments: str) -> list[str]:
        """Return the command that starts the rank's side in it."""
        # Without byte code: another version's does not belong into this package's folder.
        return [self.path, "-B", str(RANK_FOLDER), *arguments]

    def environment(self) -> dict[str, str]:
        """Return the variables that it inherits."""
        return {name: value for name, value in os.environ.items() if self.own or name not in _OWN_VARIABLES}


def find_interpreter(named: str | None) -> tuple[Interpreter, InstalledRuntimes]:
    """Return the interpreter of an option, of the variable, or this one, and its packages; raise RuntimeError where it cannot hold a rank."""
    variable = os.environ.get(PYTHON_VARIABLE) or None
    option, path = (PYTHON_VARIABLE, variable) if named is None else ("rank_python", named)
    where = f"this Python ({sys.executable})" if path is None else f"{option}={path}"
    program = shutil.which(sys.executable if path is None else path)
    if program is None:
        raise RuntimeError(f"{where}: there is no such program; {_INSTEAD}")
    interpreter = Interpreter(program, path is None)
    answer = _probe_interpreter(where, interpreter)
    python = str(answer["python"])
    if answer["numpy"] is None:
        raise RuntimeError(
            f"{where} is Python {python} without a numpy that works ({answer['numpy_problem']}), and a rank needs one; "
            f"install it there: {program} -m pip install numpy"
        )
    return interpreter, InstalledRuntimes(python, answer["torch"], answer["packages"])


def _probe_interpreter(where: str, interpreter: Interpreter) -> dict[str, Any]:
    """Return an interpreter's description of itself; raise RuntimeError where it comes too late, is too long, or is none."""
    command, environment = interpreter.command("probe"), interpreter.environment()
    with (
        tempfile.TemporaryFile() as output,
        Processes().start(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        deadline, status = time.monotonic() + _ANSWER_TIMEOUT, None
        while status is None:
            status = process.poll()
            if os.fstat(output.fileno()).st_size > _LARGEST_ANSWER:
                raise RuntimeError(f"{where} wrote more than {_LARGEST_ANSWER:,} bytes, as no Python does; {_INSTEAD}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{where} did not say within {_ANSWER_TIMEOUT:.0f} s what it has; {_INSTEAD}")
            time.sleep(0.01)
        lines = os.pread(output.fileno(), _LARGEST_ANSWER, 0).decode("utf-8", errors="replace").strip().splitlines()
    if status != 0:
        said = lines[-1][:300] if lines else "it said nothing"
        raise RuntimeError(f"{where} ended with status {status} ({said}); {_INSTEAD}")
    nonsense = RuntimeError(f"{where} answered {''.join(lines)[:80]!r}, as no Python does; {_INSTEAD}")
    try:
        answer: dict[str, Any] = json.loads(lines[-1] if lines else "")
        version = tuple(map(int, answer["python"].split(".")[:2]))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise nonsense from None
    if version < OLDEST_PYTHON:  # which answers nothing else
        least = ".".join(map(str, OLDEST_PYTHON))
        raise RuntimeError(f"{where} is Python {answer['python']}, and a rank needs {least} or later; {_INSTEAD}")
    packages = answer.get("packages")
    if answer.keys() != _ANSWERED or not isinstance(packages, dict) or packages.keys() != _PACKAGES:
        raise nonsense
    return answer


class RankProcess:
    """A child process with a core for each of its ranks, and memory and events by the descriptors `shared`; it has `grace` seconds to end."""

    def __init__(
        self, interpreter: Interpreter, plan: RankPlan, environment: Mapping[str, str], shared: list[int], grace: float
    ) -> None:
        self.plan, self.grace = plan, grace
        ranks = ", ".join(map(str, plan.ranks))
        self.name = f"rank {ranks} of {plan.world_size}" if len(plan.ranks) == 1 else f"all {plan.world_size} ranks"
        parent, child = socket.socketpair()
        self.pipe = Channel(parent)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process runs
        self.process = TiedProcess(
            interpreter.command("serve", str(child.fileno()), str(shared[0]), ",".join(map(str, shared[1:]))),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log.fileno(),
            stderr=subprocess.STDOUT,
            pass_fds=(child.fileno(), *shared),
            grace=grace,
        )
        child.close()

    def send(self, command: dict[str, Any], data: bytes, timeout: float) -> None:
        """Send a command; where the process has died or does not listen, `receive` raises."""
        with contextlib.suppress(OSError):
            self.pipe.send(command, data, timeout)

    def receive(self, doing: str, timeout: float, most: int) -> tuple[NeuronRuntimeError | None, bytearray]:
        """Return what went wrong in the process, or None, and the data of its answer, of `most` bytes.

        Raise NeuronRuntimeError where the process has ended or answered with something else, and TimeoutError as `Channel.receive`.
        """
        failed = f"{doing} failed: the process of {self.name}"
        try:
            answer, data = self.pipe.receive(timeout, most)
            if not answer:
                return None, data
            text, step, missing = str(answer["error"]), str(answer["doing"]), bool(answer["missing"])
        except EOFError:
            how = "closed its end"
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(self.grace)
                how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            raise NeuronRuntimeError(f"{failed} {how}; load the model again{self._read_tail()}") from None
        except (WireError, KeyError) as error:
            raise NeuronRuntimeError(
                f"{failed} answered what no rank says ({error}); load the model again, without what writes to the "
                f"descriptors of other code there{self._read_tail()}"
            ) from None
        failure = missing_library(text, step) if missing else runtime_error(text, step)
        prefix = f"{self.name}: " if self.plan.world_size > 1 else ""
        return NeuronRuntimeError(prefix + str(failure), code=failure.code, recoverable=failure.recoverable), data

    def end(self) -> None:
        """Kill what is left of the process, and close its log."""
        self.process.end()
        self._log.close()

    def _read_tail(self) -> str:
        """Return the end of what the process printed."""
        text = os.pread(self._log.fileno(), 1 << 20, 0).decode("utf-8", errors="replace").strip()
        return f"\n{text[-1500:]}" if text else ""


def end_processes(ranks: Sequence[RankProcess], events: Sequence[int]) -> None:
    """End all processes together, as one may wait for another; kill those that do not end. Close the events of their steps."""
    for rank in ranks:
        rank.pipe.close()
    deadline = time.monotonic() + max((rank.grace for rank in ranks), default=0.0)
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        rank.end()
    for event in events:
        os.close(event)
