# SPDX-License-Identifier: Apache-2.0
"""The life of a server: it loads an artifact, serves requests, and ends when the last one has its answer."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...config import NeuronConfig
from ...generate.text_model import TextModel
from .app import create_app
from .gate import Gate
from .metrics import Metrics
from .prompts import PromptEncoder
from .protocol import LoadedModel
from .tracing import Tracing


# Seconds that clients have to read what was generated for them, once the server ends.
LAST_READS = 10
# Seconds from the connection's start, or from its last answer, to a whole head of a request.
HEAD_SECONDS = 10.0
# Seconds that a client may read nothing, and the bytes that it has to read for each further second.
WRITE_SECONDS, SLOWEST_READER = 30.0, 4096


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of `optimum-cli neuron serve`; times are in seconds."""

    artifact: Path
    name: str
    api_key: str | None
    max_queue: int
    drain_timeout: float
    step_timeout: float
    trust_remote_code: bool
    rank_python: str | None
    rank_timeout: float | None
    otlp_traces_endpoint: str | None


class LoadedApp(NamedTuple):
    """An application over a loaded model, with its admission and metrics."""

    app: Starlette
    served: LoadedModel
    gate: Gate
    metrics: Metrics


@contextmanager
def load_app(options: ServerOptions) -> Iterator[LoadedApp]:
    """Load the artifact and start its engine, which ends with the context; raise ValueError where it has no tokenizer."""
    endpoint = options.otlp_traces_endpoint
    with ExitStack() as life:
        tracing = None if endpoint is None else life.enter_context(closing(Tracing(endpoint, options.name)))
        start = time.perf_counter()
        model = TextModel.from_pretrained(
            options.artifact,
            trust_remote_code=options.trust_remote_code,
            rank_python=options.rank_python,
            rank_timeout=options.rank_timeout,
        )
        service = life.enter_context(model.serve(step_timeout=options.step_timeout))
        served = LoadedModel(model, service, model.tokenizer, options.name, time.perf_counter() - start)
        gate = Gate(served.config.batch_size, options.max_queue, lambda: served.service.stopped)
        metrics = Metrics(served, gate)
        encoder = life.enter_context(closing(PromptEncoder(served.tokenizer, served.config)))
        app = create_app(served, gate, metrics, encoder, api_key=options.api_key, tracing=tracing)
        yield LoadedApp(app, served, gate, metrics)


class WatchedConnection(H11Protocol):
    """A connection that knows how long it waits for its client, for a head or for room to write; `Body` times bodies."""

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
        waited = self.loop.time() - self._since
        if self.flow.write_paused:
            read = max(self._unsent - self.transport.get_write_buffer_size(), 0)
            return waited > WRITE_SECONDS + read / SLOWEST_READER
        # The rest of a refused body is part of the wait for the next head.
        is_idle = self.transport.is_closing() or self.cycle is None or self.cycle.response_complete
        return is_idle and waited > HEAD_SECONDS


class DrainingServer(uvicorn.Server):
    """A server that at a first SIGTERM or SIGINT answers all admitted requests and refuses others until it ends; a second
    signal ends it at once. `stop` ends the requests that have no answer after so many seconds."""

    def __init__(self, app: ASGIApp, gate: Gate, seconds: float, stop: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http=WatchedConnection,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2 * LAST_READS,  # for what is left after `shutdown` closed the connections
        )
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
        """Close late connections and look for the end, ten times a second."""
        if counter % 10 == 0:
            self._close_connections(late_ones=True)
        is_over = self._deadline is not None and time.monotonic() >= self._deadline
        if is_over and self._gate.live:
            sys.stderr.write(f"ending: {self._gate.live} requests got no answer within {self._seconds:g} s\n")
            await asyncio.to_thread(self._stop)
        self.should_exit = self._gate.draining and (is_over or not self._gate.live)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for clients that read their answers, and close the connections of the others: uvicorn would log each."""
        closing = asyncio.get_running_loop().call_later(LAST_READS, self._close_connections)
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()

    def _close_connections(self, *, late_ones: bool = False) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, WatchedConnection) and (connection.is_late or not late_ones):
                connection.transport.abort()


def serve_artifact(options: ServerOptions, listening: socket.socket) -> None:
    """Serve at a listening socket until SIGTERM or SIGINT, then until the last request has its answer, or the time for that is over."""
    with load_app(options) as loaded:
        announce_server(options, loaded.served.config, listening)
        stop = partial(loaded.served.service.close, timeout=LAST_READS)
        DrainingServer(loaded.app, loaded.gate, options.drain_timeout, stop).run(sockets=[listening])


def announce_server(options: ServerOptions, config: NeuronConfig, listening: socket.socket, more: str = "") -> None:
    host, port = listening.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    sys.stderr.write(
        f"serving {options.name} at http://{where}:{port}/v1: {more}{config.batch_size} requests of up to "
        f"{config.sequence_length:,} tokens at once, {options.max_queue} may wait\n"
    )
