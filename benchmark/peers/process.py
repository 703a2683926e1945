# SPDX-License-Identifier: Apache-2.0
"""The parent's side of a worker: a process that is asked one thing at a time, and where it runs. Knows no runtime."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..machine import last_error, openmp_of, proc_bytes
from .names import Peer
from .workers.protocol import UnsupportedError


ROOT = Path(__file__).resolve().parents[2]
CONVERTED = "converted.json"
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
        peak = 0
        for pid in _family(self._process.pid):
            with suppress(OSError):  # it ended
                peak += proc_bytes(f"/proc/{pid}/status", "VmHWM")
        return peak

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


def worker_variables(python: Path, threads: int) -> dict[str, str]:
    """Return the environment variables of a worker: as many threads as all others have, and no network."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if python == Path(sys.executable):
        return variables
    vllm = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return variables | vllm | openmp_of(python)


@dataclass(frozen=True)
class Place:
    """Where a peer runs on a checkpoint in a precision.

    Attributes:
        loading: arguments of its worker's `load`.
        log: what its worker says.
    """

    peer: Peer
    python: Path
    loading: dict[str, Any]
    log: Path

    def start(self) -> Worker:
        """Start its worker, which has loaded nothing yet."""
        module, *arguments = self.peer.worker
        command = [str(self.python), "-m", f"benchmark.peers.workers.{module}", *arguments]
        return Worker(self.peer.name, command, worker_variables(self.python, self.loading["threads"]), self.log)

    def convert(self) -> float | None:
        """Have a peer write what it loads, unless an earlier run did; return the seconds, of that run if need be.

        Raises:
            WorkerError: it failed.
            UnsupportedError: it has no such precision.
        """
        folder = Path(self.loading["folder"])
        stamp = folder / CONVERTED
        if not self.peer.is_ours:  # our exports know themselves whether they are out of date
            if stamp.is_file():
                seconds: float | None = json.loads(stamp.read_text(encoding="utf-8"))["seconds"]
                return seconds
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        with closing(self.start()) as worker:
            arguments = {name: value for name, value in self.loading.items() if name != "threads"}
            seconds = worker.ask("convert", **arguments)["seconds"]
        stamp.write_text(json.dumps({"seconds": seconds}), encoding="utf-8")
        return seconds
