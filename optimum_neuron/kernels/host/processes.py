# SPDX-License-Identifier: Apache-2.0
"""Processes that compile or run graphs for this one: ended together, and none outlives it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from .machine import available_memory, usable_cpus


_GUARD = Path(__file__).with_name("guard.py")


class TiedProcess(subprocess.Popen[Any]):
    """A command in a session of its own, which ends with this process, however this one ends, and with all that it started.

    Its process id is that of its guard (guard.py), and its exit status the command's. A Ctrl-C reaches this process alone.
    """

    def __init__(
        self, command: Sequence[str], *, grace: float = 0.0, pass_fds: Sequence[int] = (), **options: Any
    ) -> None:
        """Start it; the command has `grace` seconds to end by itself, once this process has ended."""
        lifeline, own_end = os.pipe()
        self._cut = weakref.finalize(self, os.close, own_end)
        guard = [sys.executable, "-I", "-S", str(_GUARD), str(lifeline), str(os.getpid()), str(grace)]
        try:
            super().__init__([*guard, *command], pass_fds=(lifeline, *pass_fds), start_new_session=True, **options)
        finally:
            os.close(lifeline)

    def end(self) -> None:
        """Kill it and all that it started; what has ended already is no error."""
        if self._cut.alive:
            self.terminate()  # the guard, which kills the others
            self.wait()
            self._cut()


class Processes:
    """Processes that several threads start and wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[TiedProcess] = set()
        self._ended = False

    @contextlib.contextmanager
    def start(self, command: Sequence[str], **options: Any) -> Iterator[TiedProcess]:
        """Start a process, and end what is left of it with the context.

        Raises:
            RuntimeError: `end` was called.
        """
        with self._lock:
            if self._ended:
                raise RuntimeError("compiling was stopped")
            process = TiedProcess(command, **options)
            self._running.add(process)
        try:
            yield process
        finally:
            process.end()
            with self._lock:
                self._running.discard(process)

    def end(self) -> None:
        """End what runs, so that the threads that wait for it continue; no more will start."""
        with self._lock:
            self._ended = True
            running = list(self._running)
        for process in running:
            process.end()


def run_jobs(jobs: Iterable[Callable[[], None]], threads: int, end_processes: Callable[[], None]) -> None:
    """Run jobs that wait for processes, several at once; where one fails, or this thread is interrupted, end all.

    Raises:
        BaseException: what the first job raised that failed, once none is left.
    """
    with ThreadPoolExecutor(threads) as pool:
        try:  # from here on: leaving the pool waits for what has started
            for future in as_completed([pool.submit(job) for job in jobs]):
                future.result()
        except BaseException:
            end_processes()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def parallel_jobs(jobs: int, memory_per_job: int) -> int:
    """Return how many of `jobs` may run at once, by usable CPUs and free memory; at least one."""
    memory = available_memory()
    fitting = jobs if memory is None else memory // memory_per_job
    return max(1, min(jobs, usable_cpus(), fitting))
