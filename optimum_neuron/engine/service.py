# SPDX-License-Identifier: Apache-2.0
"""A thread that runs an engine for callers in other threads or event loops, such as the handlers of a web server."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..core import Request
from ..errors import first_line
from .engine import Engine
from .events import Event, RequestFailedError, RequestFailure
from .stream import Item, Mailbox, TokenStream


logger = logging.getLogger(__name__)

# Seconds that the end of a program waits for the thread: more than a step takes, and finite where a callback never returns.
_AT_EXIT = 60
# Seconds between two looks at a step under way, at most.
_LOOK = 1.0


class EngineStoppedError(RuntimeError):
    """The engine's thread ended before the request did; `__cause__` is what ended it, if it failed."""


class EngineHungError(RuntimeError):
    """A step takes longer than one may."""


def _drop_item(item: Item) -> None:
    """Take a token of a request that has no reader yet, or one that failed to take them."""


@dataclass(eq=False)
class _LiveRequest:
    """A live request and where its tokens go. Its identity distinguishes it from a later request with the same id."""

    request: Request
    put: Callable[[Item], None] = _drop_item


class EngineService:
    """Runs an engine in a thread of its own from the first request on. Safe to call from any thread.

    Requests are taken over between two steps, so that no caller ever waits for a step. As a context manager it closes,
    after the requests finished where no exception came. If no caller closes it, the end of the program does, and aborts
    what still runs.

    Args:
        on_close: called once when the engine has stopped: of one that hangs, once its step has ended, as that uses the slots.
        step_timeout: seconds that a step may take before it counts as hung and all requests fail; None: no limit.

    Attributes:
        engine: what it runs. Its counts may be read at any time, and change while a step does.
        failure: what ended the engine; None where it runs, or was closed.
    """

    def __init__(
        self, engine: Engine, on_close: Callable[[], None] | None = None, *, step_timeout: float | None = None
    ) -> None:
        self.engine = engine
        self._process = engine.runner.process
        self._on_close = on_close
        self._live: dict[str, _LiveRequest] = {}
        # Requests, and whether they begin or end; None ends a wait.
        self._inbox: queue.SimpleQueue[tuple[_LiveRequest, bool] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self.failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._step_timeout = step_timeout
        self._step_began: float | None = None
        self._over = threading.Event()  # the thread has ended, or is given up

    @property
    def is_running(self) -> bool:
        """Return whether the thread runs: from the first request until the service is closed."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def stopped(self) -> str | None:
        """Why no more requests are taken; None where they are."""
        if not self._closed:
            return None
        return "it was closed" if self.failure is None else first_line(self.failure)

    def submit(self, request: Request) -> TokenStream:
        """Queue a request and return its tokens to come.

        Raises:
            ValueError: the request could never be served, or one with its id is not finished.
            RuntimeError: the service is closed, its engine failed, or this process was forked from the one where it runs.
        """
        entry = _LiveRequest(request)
        mailbox = Mailbox(lambda: self._inbox.put((entry, False)))
        entry.put = mailbox.put_item
        self._enter_request(entry)
        return TokenStream(request.request_id, mailbox, self._process)

    def subscribe(self, request: Request, put: Callable[[Item], None]) -> None:
        """Queue a request, with a function that the engine's thread calls with each token, or with why there is none.

        Where it raises, its request ends, and it is called a last time, with a `RequestFailedError`.
        """
        self._enter_request(_LiveRequest(request, put))

    def abort_request(self, request_id: str) -> None:
        """End a request soon; one that is unknown or finished is left as it is."""
        self._process.check_fork()
        if (entry := self._live.get(request_id)) is not None:
            self._inbox.put((entry, False))

    def _enter_request(self, entry: _LiveRequest) -> None:
        self._process.check_fork()
        self.engine.check_request(entry.request)
        request_id = entry.request.request_id
        with self._lock:
            if self._closed:
                raise EngineStoppedError("the engine service is closed and takes no requests") from self.failure
            if request_id in self._live:
                raise ValueError(f"request {request_id!r} is not finished; choose another id, or abort the first one")
            if self._thread is None:
                self._start_thread()
            self._live[request_id] = entry
            self._inbox.put((entry, True))

    def _start_thread(self) -> None:
        # Killed in native code, a thread takes the program along; an endless wait for it keeps a program that forgot to close
        # it from ending. At exit, threads that may still read tokens, those that are no daemons, are over.
        self._thread = threading.Thread(target=self._run_steps, name="optimum-neuron-engine", daemon=True)
        self._thread.start()
        if self._step_timeout is not None:
            threading.Thread(target=self._watch_steps, name="optimum-neuron-watch", daemon=True).start()
        atexit.register(self._close_at_exit)

    def close(self, *, finish: bool = False, timeout: float | None = None) -> None:
        """Take no more requests, end those that are there, and wait for the thread; do nothing in a forked process.

        Args:
            finish: let the requests finish first, instead of aborting them.
            timeout: seconds to wait for a step under way; one that takes longer is given up, and its requests fail.
        """
        if not self._end_all(finish=finish, timeout=timeout):
            self._fail_all(EngineHungError(f"the step under way did not end within {timeout or 0:g} s"))

    def _close_at_exit(self) -> None:
        self._end_all(finish=False, timeout=_AT_EXIT)

    def _end_all(self, *, finish: bool, timeout: float | None) -> bool:
        """Close; return whether the thread has ended, or is given up already."""
        if not self._process.is_here:
            return True
        with self._lock:
            self._closed = True
        if not finish:
            for entry in list(self._live.values()):
                self._inbox.put((entry, False))
        self._inbox.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            if not self._over.wait(timeout):
                return False
            if not isinstance(self.failure, EngineHungError):
                self._thread.join(timeout)
        atexit.unregister(self._close_at_exit)
        if not isinstance(self.failure, EngineHungError):
            self._release_slots()
        return True

    def _release_slots(self) -> None:
        with self._lock:
            on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __enter__(self) -> EngineService:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(finish=error is None)

    def _run_steps(self) -> None:
        try:
            while self.failure is None and self._take_over():
                self._step_began = time.monotonic()
                events = self.engine.step()
                self._step_began = None
                for event in events:
                    self._deliver_event(event)
            if self.failure is not None:  # a step ended after all, of an engine that was given up
                self.engine.abort_requests()
        except BaseException as error:  # callers that wait for tokens must learn of it
            logger.exception("the engine stopped")
            self.engine.abort_requests()
            self._fail_all(error)
        finally:
            self._over.set()
            if isinstance(self.failure, EngineHungError):
                self._release_slots()

    def _watch_steps(self) -> None:
        """Give the engine up where a step takes too long. Nothing ends a thread in native code: it is left alone."""
        limit = self._step_timeout
        assert limit is not None
        while not self._over.wait(min(_LOOK, limit / 4)):
            began = self._step_began
            if began is not None and time.monotonic() - began > limit:
                self._fail_all(EngineHungError(f"a step took more than {limit:g} s"))

    def _take_over(self) -> bool:
        """Add and abort what callers asked for; wait where there is nothing to do. Return False where all is done."""
        while True:
            try:
                item = self._inbox.get(block=not self.engine.has_work and not self._closed)
            except queue.Empty:
                return self.engine.has_work
            if item is None:
                continue
            entry, is_new = item
            request_id = entry.request.request_id
            if is_new:
                try:
                    self.engine.add_request(entry.request)
                except Exception as error:  # what `check_request` could not foresee ends no other request
                    del self._live[request_id]
                    self._call_back(entry, RequestFailedError(request_id, "it could not be added", error))
            elif self._live.get(request_id) is entry:
                self.engine.abort_request(request_id)
                del self._live[request_id]
                self._call_back(entry, "abort")

    def _deliver_event(self, event: Event) -> None:
        entry = self._live.get(event.request_id)
        if entry is None:  # the engine was given up meanwhile
            return
        if isinstance(event, RequestFailure) or event.finish_reason is not None:
            del self._live[event.request_id]
        self._call_back(entry, event.error if isinstance(event, RequestFailure) else event)

    def _call_back(self, entry: _LiveRequest, item: Item) -> None:
        """Call back. Whatever a callback raises ends its own request, and no signal's handler raises in this thread."""
        try:
            entry.put(item)
        except BaseException as error:
            put, entry.put = entry.put, _drop_item
            request_id = entry.request.request_id
            failed = RequestFailedError(request_id, "its callback raised", error)
            logger.error("%s", failed, exc_info=error)
            if self._live.get(request_id) is entry:
                del self._live[request_id]
                self.engine.abort_request(request_id)
            try:
                put(failed)
            except BaseException:
                logger.exception("the callback of request %r raised again when it got its failure", request_id)

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            self._closed, self.failure = True, self.failure or error
            entries, self._live = list(self._live.values()), {}
        self._over.set()
        for entry in entries:
            request_id = entry.request.request_id
            stopped = EngineStoppedError(f"the engine stopped before request {request_id!r} finished: {error}")
            stopped.__cause__ = error
            self._call_back(entry, stopped)
