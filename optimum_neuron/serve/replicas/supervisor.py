# SPDX-License-Identifier: Apache-2.0
"""Has a server run for each replica: asks it for its health, gives it up where it does not answer, and starts another."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2

from .launcher import Launcher, RunningServer
from .replica import Replica


@dataclass(frozen=True)
class Patience:
    """How long things may take, in seconds.

    Attributes:
        interval: between two looks at a server.
        answer: for an answer of /health.
        failures: answers in a row that may be missing before a server is given up.
        first_restart: before a server is started anew, doubled up to `last_restart` while none comes up.
        place: before it is told that a replica waits for a machine.
    """

    interval: float = 1.0
    answer: float = 10.0
    failures: int = 3
    first_restart: float = 1.0
    last_restart: float = 60.0
    place: float = 15.0


class StartError(RuntimeError):
    """No server came up."""


class Supervisor:
    """Keeps the servers of all replicas."""

    def __init__(
        self,
        launcher: Launcher,
        replicas: Sequence[Replica],
        client: httpx2.AsyncClient,
        patience: Patience | None = None,
    ) -> None:
        self._launcher, self._replicas, self._client = launcher, replicas, client
        self._patience = patience or Patience()
        self._came_up = False

    async def run(self) -> None:
        """Runs until it is cancelled, and stops all servers then.

        Raises:
            StartError: a server ended before any was ever up: the next one would, too.
        """
        tasks = [asyncio.create_task(self._keep(replica)) for replica in self._replicas]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await done.pop()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, replica: Replica) -> None:
        wait = self._patience.first_restart
        while True:
            server = await asyncio.to_thread(self._launcher.start, replica.index)
            was_up = False
            try:
                was_up, reason = await self._watch(replica, server)
            finally:
                replica.give_up()
                await asyncio.to_thread(server.stop)
            if not self._came_up:
                raise StartError(f"no replica came up: of replica {replica.index} {reason}, and its output says why")
            wait = self._patience.first_restart if was_up else min(2 * wait, self._patience.last_restart)
            _tell(f"replica {replica.index}: {reason}; another one is started in {wait:g} s")
            await asyncio.sleep(wait)
            replica.restarts += 1

    async def _watch(self, replica: Replica, server: RunningServer) -> tuple[bool, str]:
        """Until a server has ended or is given up: whether it ever was up, and why."""
        was_up, failures, start, told = False, 0, time.monotonic(), False
        while True:
            ending = await asyncio.to_thread(server.ended)
            if ending is not None:
                return was_up, ending
            url = await asyncio.to_thread(server.url)
            if url is not None and await self._is_healthy(url):
                failures = 0
                if replica.url is None:
                    replica.up(url)
                    self._came_up = was_up = True
                    _tell(f"replica {replica.index} serves at {url}")
            elif was_up:
                replica.pause()
                failures += 1
                if failures >= self._patience.failures:
                    return was_up, f"its server did not answer {failures} times"
            elif url is None and not told and time.monotonic() - start > self._patience.place:
                told = True
                _tell(f"replica {replica.index} waits for {self._launcher.wanted}")
            await asyncio.sleep(self._patience.interval)

    async def _is_healthy(self, url: str) -> bool:
        try:
            answer = await self._client.get(f"{url}/health", timeout=self._patience.answer)
        except httpx2.TransportError:
            return False
        return answer.status_code == 200


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
