# SPDX-License-Identifier: Apache-2.0
"""An HTTP server that closes the connections of clients that let it wait, and ends when the last request has its answer."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from .connections import WatchedConnection
from .gate import Gate


# Seconds that clients have to read what was generated for them, once the server ends.
LAST_READS = 10


def server_config(app: ASGIApp) -> uvicorn.Config:
    """How applications are served."""
    return uvicorn.Config(
        app,
        http=WatchedConnection,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2 * LAST_READS,  # for what is left after `shutdown` closed the connections
    )


class DrainingServer(uvicorn.Server):
    """At a first SIGTERM or SIGINT it answers those whose requests run or wait, and refuses others until it ends; a second
    one ends it at once.

    Args:
        seconds: for those answers, from the first signal on.
        stop: ends the requests that have no answer by then.
    """

    def __init__(self, config: uvicorn.Config, gate: Gate, seconds: float, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._gate, self._seconds, self._stop = gate, seconds, stop
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._gate.draining:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self._gate.draining = True
        self._deadline = time.monotonic() + self._seconds
        sys.stderr.write(
            f"ending: {self._gate.live} requests get their answers first, within {self._seconds:g} s; a second signal ends at once\n"
        )

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if counter % 10 == 0:
            self._close(late_ones=True)
        is_over = self._deadline is not None and time.monotonic() >= self._deadline
        if is_over and self._gate.live:
            sys.stderr.write(f"ending: {self._gate.live} requests got no answer within {self._seconds:g} s\n")
            await asyncio.to_thread(self._stop)
        self.should_exit = self._gate.draining and (is_over or not self._gate.live)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for clients that read their answers, and close the connections of the others.

        uvicorn would cancel their tasks, each with a traceback in the log.
        """
        closing = asyncio.get_running_loop().call_later(LAST_READS, self._close)
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()

    def _close(self, *, late_ones: bool = False) -> None:
        """Close all connections, or those alone whose clients let the server wait for too long."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, WatchedConnection) and (connection.is_late or not late_ones):
                connection.transport.abort()
