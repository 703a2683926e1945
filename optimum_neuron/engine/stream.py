# SPDX-License-Identifier: Apache-2.0
"""The tokens of one request between the engine's thread and their reader."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from functools import partial

from ..core import FinishReason
from ..runtime.process import OwnProcess
from .events import TokenEvent


# A token, or why a request ends without one more.
Item = TokenEvent | FinishReason | BaseException


class Mailbox:
    """Tokens that the engine's thread left. It knows no stream, so that one is gone when its reader drops it.

    `abort` ends the request; from any thread, and even where nothing may wait.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self.abort = abort
        self.items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.wake: Callable[[], object] | None = None

    def put_item(self, item: Item) -> None:
        """Leave a token, or why there will be none; the engine's thread calls it."""
        self.items.put(item)
        if self.wake is not None:
            try:
                self.wake()
            except RuntimeError:  # the reader's event loop is closed
                self.abort()


class TokenStream:
    """The tokens of one request as they come: `for` and `async for` yield token ids. Made by `EngineService.submit`.

    One consumer at a time. Where tokens are left when a stream is closed, left as a context manager, or dropped, its
    request is aborted, so that its slot is free with the next step. One that is kept and not read runs to its end.

    Attributes:
        finish_reason: set when the last token was read, or the request was aborted.

    Raises:
        RequestFailedError: reading; the request ended by a fault of its own.
        RuntimeError: reading; the engine ended before the request did, or this process was forked from the one where it runs.
    """

    def __init__(self, request_id: str, mailbox: Mailbox, process: OwnProcess) -> None:
        self.request_id = request_id
        self.finish_reason: FinishReason | None = None
        self._mailbox = mailbox
        self._process = process
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = asyncio.Event()

    def abort(self) -> None:
        """End the request, from any thread; tokens that are already there can still be read."""
        self._process.check_fork()
        self._mailbox.abort()

    def close(self) -> None:
        """End the request where it has not ended; do nothing in a forked process, which has no such request."""
        if self.finish_reason is None and self._process.is_here:
            self._mailbox.abort()

    async def aclose(self) -> None:
        """`close`, as `contextlib.aclosing` calls it."""
        self.close()

    __del__ = close

    def _read_item(self, item: Item) -> int | None:
        """Return the token of an item; None where the stream ends with it."""
        if isinstance(item, TokenEvent):
            self.finish_reason = item.finish_reason
            return item.token_id
        if isinstance(item, BaseException):
            self._mailbox.items.put(item)  # the next read raises it again, instead of waiting for ever
            raise item
        self.finish_reason = item
        return None

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> int:
        self._process.check_fork()
        token = None if self.finish_reason else self._read_item(self._mailbox.items.get())
        if token is None:
            raise StopIteration
        return token

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> int:
        self._process.check_fork()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the first one, or the one before is closed
            self._loop, self._ready = loop, asyncio.Event()
            self._mailbox.wake = partial(loop.call_soon_threadsafe, self._ready.set)
        while not self.finish_reason:
            self._ready.clear()
            try:
                item = self._mailbox.items.get_nowait()
            except queue.Empty:
                await self._ready.wait()
                continue
            token = self._read_item(item)
            if token is not None:
                return token
        raise StopAsyncIteration

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
