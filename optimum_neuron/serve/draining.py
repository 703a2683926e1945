# SPDX-License-Identifier: Apache-2.0
"""An HTTP server that ends when the last request has its answer."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp


# Seconds that clients have to read what was generated for them, once the server ends.
_LAST_READS = 10


class Draining(Protocol):
    """Who counts the requests.

    Attributes:
        draining: set at a signal; nobody comes in any more.
    """

    draining: bool

    @property
    def live(self) -> int:
        """Requests that did not end."""


def server_config(app: ASGIApp) -> uvicorn.Config:
    """How applications are served."""
    return uvicorn.Config(
        app, lifespan="off", ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=_LAST_READS
    )


class DrainingServer(uvicorn.Server):
    """At a first SIGTERM or SIGINT it answers those whose requests run or wait, and refuses others until it ends; a second
    one ends it at once."""

    def __init__(self, config: uvicorn.Config, gate: Draining) -> None:
        super().__init__(config)
        self._gate = gate

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called at a signal."""
        if self._gate.draining:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self._gate.draining = True
        sys.stderr.write(f"ending: {self._gate.live} requests get their answers first; a second signal ends at once\n")

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        self.should_exit = self._gate.draining and not self._gate.live
        return await super().on_tick(counter)
