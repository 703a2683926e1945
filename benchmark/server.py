# SPDX-License-Identifier: Apache-2.0
"""A server in processes of its own: how it is started, when it is ready, how it ends. Needs no package but Python's own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .machine import last_error


START_LIMIT_S, STOP_LIMIT_S, POLL_S = 600.0, 30.0, 0.1


class RunningServer:
    """A server on a free port, from the entry of the `with` statement to its exit.

    Args:
        command: without its port.
        environment: all of its variables.
        log: where it writes what it says, in the folder that it runs in.
        path: what answers when it is ready.

    Attributes:
        started_s: seconds until it answered.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, path: str = "/health"
    ) -> None:
        self.name, self._command, self._environment, self._log, self._path = name, command, environment, log, path

    def __enter__(self) -> RunningServer:
        start = time.perf_counter()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self._environment),
                cwd=self._log.parent,
                start_new_session=True,  # its engine is another process, and ends with it
            )
        try:
            while not self._answers():
                self.check()
                if time.perf_counter() - start > START_LIMIT_S:
                    reason = last_error(self._log)
                    raise RuntimeError(f"the server {self.name} was not ready after {START_LIMIT_S:.0f} s: {reason}")
                time.sleep(POLL_S)
        except BaseException:
            self._stop()
            raise
        self.started_s = time.perf_counter() - start
        return self

    def __exit__(self, *ended: object) -> None:
        self._stop()

    def check(self) -> None:
        """Raise RuntimeError, with what the server said last, where it has ended."""
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(f"the server {self.name} ended with exit code {code}: {last_error(self._log)}")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{self._path}", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _stop(self) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_LIMIT_S)
        with suppress(ProcessLookupError):  # none of them is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
