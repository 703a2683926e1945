# SPDX-License-Identifier: Apache-2.0
"""A thread that runs an engine for callers in other threads or event loops, such as the handlers of a web server."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from .engine import Engine
from .request import FinishReason, Request
from .step import TokenEvent


logger = logging.getLogger(__name__)


class EngineStoppedError(RuntimeError):
    """The engine's thread ended before the request did; `__cause__` is what ended it, if it failed."""


# A token, or why a request ends without one more.
Item = TokenEvent | FinishReason | BaseException


class TokenStream:
    """The tokens of one request as they come: `for` and `async for` yield token ids. Made by `EngineService.submit`.

    One consumer at a time. As a context manager it aborts the request where its tokens are not read to the end.

    Attributes:
        finish_reason: set when the last token was read, or the request was aborted.
    """

    def __init__(self, request_id: str, abort: Callable[[], None]) -> None:
        self.request_id = request_id
        self.finish_reason: FinishReason | None = None
        self._abort = abort
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._ready: asyncio.Event | None = None
        self._wake: Callable[[], object] | None = None

    def put(self, item: Item) -> None:
        """Called by the engine's thread: a token, or why there will be none."""
        self._items.put(item)
        if self._wake is not None:
            try:
                self._wake()
            except RuntimeError:  # the consumer's event loop is closed: nobody will read on
                self.abort()

    def abort(self) -> None:
        """Ends the request, from any thread; tokens that are already there can still be read."""
        self._abort()

    def _token(self, item: Item) -> int | None:
        """The token of an item; None where the stream ends with it."""
        if isinstance(item, TokenEvent):
            self.finish_reason = item.finish_reason
            return item.token_id
        if isinstance(item, BaseException):
            self._items.put(item)  # whoever reads on is told again, instead of waiting for ever
            raise item
        self.finish_reason = item
        return None

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> int:
        token = None if self.finish_reason else self._token(self._items.get())
        if token is None:
            raise StopIteration
        return token

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> int:
        if self._ready is None:
            self._ready = asyncio.Event()
            self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, self._ready.set)
        while not self.finish_reason:
            self._ready.clear()
            try:
                item = self._items.get_nowait()
            except queue.Empty:
                await self._ready.wait()
                continue
            token = self._token(item)
            if token is not None:
                return token
        raise StopAsyncIteration

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.finish_reason:
            self.abort()


def _nowhere(item: Item) -> None:
    """Where the tokens of an entry go until it says so."""


@dataclass(eq=False)
class _Entry:
    """A live request and where its tokens go. Its identity tells it from a later request with the same id."""

    request: Request
    put: Callable[[Item], None] = _nowhere


class EngineService:
    """Runs an engine in a thread of its own from the first request on. Safe to call from any thread.

    Requests are taken over between two steps, so that no caller ever waits for a step. As a context manager it closes,
    after the requests finished where no exception came.

    Args:
        on_close: called once when the engine has stopped.
    """

    def __init__(self, engine: Engine, on_close: Callable[[], None] | None = None) -> None:
        self._engine = engine
        self._on_close = on_close
        self._live: dict[str, _Entry] = {}
        self._inbox: queue.SimpleQueue[tuple[_Entry, bool] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread runs: from the first request until the service is closed."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_closed(self) -> bool:
        """Whether no more requests are taken: the service was closed, or its engine failed."""
        return self._closed

    def submit(self, request: Request) -> TokenStream:
        """Queues a request and returns its tokens to come.

        Raises:
            ValueError: the request could never be served, or one with its id is not finished.
            EngineStoppedError: the service is closed, or its engine failed.
        """
        self._engine.check(request)
        entry = _Entry(request)
        stream = TokenStream(request.request_id, partial(self._end, entry))
        entry.put = stream.put
        self._enter(entry)
        return stream

    def subscribe(self, request: Request, put: Callable[[Item], None]) -> None:
        """Like `submit`, with a function that the engine's thread calls with each token, or with why there is none."""
        self._engine.check(request)
        self._enter(_Entry(request, put))

    def abort(self, request_id: str) -> None:
        """Ends a request soon; one that is unknown or finished is left as it is."""
        entry = self._live.get(request_id)
        if entry is not None:
            self._end(entry)

    def _enter(self, entry: _Entry) -> None:
        request_id = entry.request.request_id
        with self._lock:
            if self._closed:
                raise EngineStoppedError("the engine service is closed and takes no requests") from self._failure
            if request_id in self._live:
                raise ValueError(f"request {request_id!r} is not finished; choose another id, or abort the first one")
            self._live[request_id] = entry
            self._inbox.put((entry, True))
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="optimum-neuron-engine", daemon=True)
                self._thread.start()

    def _end(self, entry: _Entry) -> None:
        self._inbox.put((entry, False))

    def close(self, *, finish: bool = False) -> None:
        """Takes no more requests, ends those that are there, and waits for the thread.

        Args:
            finish: let the requests finish first, instead of aborting them.
        """
        with self._lock:
            self._closed = True
        if not finish:
            for entry in list(self._live.values()):
                self._end(entry)
        self._inbox.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __enter__(self) -> EngineService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finish=error is None)

    def _loop(self) -> None:
        try:
            while self._take_over():
                for event in self._engine.step():
                    entry = self._live[event.request_id]
                    if event.finish_reason is not None:
                        del self._live[event.request_id]
                    entry.put(event)
        except BaseException as error:  # whoever waits for tokens must learn of it
            logger.exception("the engine stopped")
            self._fail(error)

    def _take_over(self) -> bool:
        """Adds and aborts what callers asked for; waits where there is nothing to do. False where all is done."""
        while True:
            try:
                item = self._inbox.get(block=not self._engine.has_work and not self._closed)
            except queue.Empty:
                return self._engine.has_work
            if item is None:
                continue
            entry, is_new = item
            if is_new:
                self._engine.add_request(entry.request)
            elif self._live.get(entry.request.request_id) is entry:
                self._engine.abort(entry.request.request_id)
                del self._live[entry.request.request_id]
                entry.put("abort")

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._closed, self._failure = True, error
            entries, self._live = list(self._live.values()), {}
        self._engine.abort_all()
        for entry in entries:
            request_id = entry.request.request_id
            stopped = EngineStoppedError(f"the engine stopped before request {request_id!r} finished: {error}")
            stopped.__cause__ = error
            entry.put(stopped)
