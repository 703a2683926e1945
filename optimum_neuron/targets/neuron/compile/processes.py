# SPDX-License-Identifier: Apache-2.0
"""Compiler processes: started in parallel, bounded in time, and ended with everything they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from .error_codes import explain_failure


OUTPUT_LOG = "output.log"


class CompilerProcesses:
    """Runs compilers from several threads; `end` stops all of them, and no more will start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def run(
        self, argv: Sequence[str], executable: str, folder: Path, environment: Mapping[str, str], timeout: float
    ) -> None:
        """Runs one compiler in a folder of its own, where it may leave files.

        Args:
            executable: the program, in place of `argv[0]`.
            timeout: seconds.

        Raises:
            RuntimeError: it failed or took too long; the message holds the end of its output.
        """
        # Its own, so that nothing stays; not below `folder`, whose path may be too long for a socket.
        with tempfile.TemporaryDirectory(prefix="neuronx-cc-", ignore_cleanup_errors=True) as temporary:
            command = [executable, *argv[1:]]
            self._run(command, folder, {**environment, "TMPDIR": temporary}, timeout)

    def _run(self, command: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float) -> None:
        with (folder / OUTPUT_LOG).open("wb") as output:
            process = self._start(command, folder, environment, output.fileno())
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the compiler did not finish within {timeout:,.0f} s and was ended; lower prefill_chunk_size or "
                f"sequence_length, or raise tensor_parallel_size\n{_tail(folder)}"
            ) from None
        finally:
            _end(process)
            with self._lock:
                self._running.discard(process)
        if status != 0:
            raise RuntimeError(explain_failure(status, _tail(folder)))

    def end(self) -> None:
        """Ends what runs; the threads that wait for it return with an error."""
        with self._lock:
            self._ended = True
            running = list(self._running)
        for process in running:
            _end(process)

    def _start(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], output: int
    ) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._ended:
                raise RuntimeError("compiling was stopped")
            process = subprocess.Popen(
                list(command),
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches the parent alone, which ends the whole group
            )
            self._running.add(process)
            return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it started; what has ended already is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(folder: Path) -> str:
    """The end of what a compiler printed and logged: an NCC code may stand in either."""
    parts = []
    for path in sorted(folder.glob("*.log")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            parts.append(file.read().decode("utf-8", errors="replace").strip())
    return "\n".join(part for part in parts if part)
