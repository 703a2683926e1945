# SPDX-License-Identifier: Apache-2.0
"""Connections whose clients may let the server wait for some time only: for a request's head, and for room to write."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


# Seconds from the connection's start, or from its last answer, to a whole head of a request.
HEAD_SECONDS = 10.0
# Seconds that a client which reads nothing is waited for, and the bytes that it has to read for each further one.
WRITE_SECONDS, SLOWEST_READER = 30.0, 4096


class WatchedConnection(H11Protocol):
    """A connection that knows for how long it has waited for its client. A body's time is counted where it is read."""

    _since = 0.0  # when the wait began
    _unsent = 0  # bytes that the client had to read then

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._since = self.loop.time()
        super().connection_made(transport)

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._since, self._unsent = self.loop.time(), self.transport.get_write_buffer_size()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._since = self.loop.time()
        super().resume_writing()

    @property
    def is_late(self) -> bool:
        """Whether the client has let the server wait for too long."""
        waited = self.loop.time() - self._since
        if self.flow.write_paused:
            read = max(self._unsent - self.transport.get_write_buffer_size(), 0)
            return waited > WRITE_SECONDS + read / SLOWEST_READER
        # The rest of a refused body is part of the wait for the next head.
        is_idle = self.transport.is_closing() or self.cycle is None or self.cycle.response_complete
        return is_idle and waited > HEAD_SECONDS
