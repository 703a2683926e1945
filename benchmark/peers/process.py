# SPDX-License-Identifier: Apache-2.0
"""The parent's side of a worker: a process that is asked one thing at a time. Knows no runtime."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .environments import last_error
from .workers.protocol import UnsupportedError


ANSWER_LIMIT_S = 1200.0
STOP_LIMIT_S = 10.0


class WorkerError(RuntimeError):
    """A worker failed; where `alive` is False there is no process any more."""

    def __init__(self, message: str, alive: bool) -> None:
        super().__init__(message)
        self.alive = alive


class Worker:
    """A process that answers JSON lines.

    Args:
        log: what it says on stderr.

    Raises:
        WorkerError: it ended before it was ready.

    Attributes:
        versions: of what it imported.
        ready_s: seconds from its start until everything was imported.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        limit_s: float = ANSWER_LIMIT_S,
    ) -> None:
        self.name, self._log, self._limit_s = name, log, limit_s
        self._unread = b""
        start = time.perf_counter()
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=dict(environment), bufsize=0
            )
        try:
            self.versions: dict[str, str] = self._answer()["versions"]
        except BaseException:
            self.close()
            raise
        self.ready_s = time.perf_counter() - start

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Has it do something.

        Raises:
            WorkerError: it could not, did not answer in time, or ended.
            UnsupportedError: its runtime has no such thing.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended: reading tells how
            self._process.stdin.write((json.dumps({"do": what} | arguments) + "\n").encode())
        return self._answer()

    def peak_bytes(self) -> int:
        """The most memory that its process had, and those that it started, by their own peaks."""
        return sum(_peak(pid) for pid in _family(self._process.pid))

    def close(self) -> None:
        """Ends it."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        line = self._line()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise WorkerError(f"{self.name} answered {line[:80]!r}, which is no JSON object", alive=True)
        if "unsupported" in answer:
            raise UnsupportedError(answer["unsupported"])
        if "error" in answer:
            raise WorkerError(f"{self.name} failed: {answer['error']}", alive=True)
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        limit = time.monotonic() + self._limit_s
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], max(0.0, limit - time.monotonic()))[0]:
                self._process.kill()
                raise WorkerError(f"{self.name} did not answer in {self._limit_s:.0f} s", alive=False)
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                code = self._process.wait()
                raise WorkerError(f"{self.name} ended with exit code {code}: {last_error(self._log)}", alive=False)
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def _family(pid: int) -> list[int]:
    """A process and all that it started, directly or not."""
    family = [pid]
    for parent in family:  # grows meanwhile
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                family += map(int, children.read_text(encoding="ascii").split())
    return family


def _peak(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
