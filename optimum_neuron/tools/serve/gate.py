# SPDX-License-Identifier: Apache-2.0
"""Limits of what a server takes in: requests, as many as run and may wait, and their bodies, by size, number of values and time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from .http import ApiError, ClientGoneError, server_error


LARGEST_BODY = 16 * 2**20
# Values and escaped characters of a body. JSON's parser lets no other thread run until it is done, and these are what takes it time.
MOST_VALUES = 2**18
_COSTLY = b",[{\\"
# A body up to this size is read where it comes, and finds room where larger ones do not.
SMALL_BODY = 64 * 2**10
# The share of the held bytes that larger bodies may take, and seconds of Retry-After where there is no room.
HELD_BYTES, _SHARE_OF_LARGE, _WAIT = 4 * LARGEST_BODY, 0.75, 5
# Seconds for a whole body to come.
BODY_SECONDS = 30.0


class Gate:
    """The count of requests to the engine, of which one HTTP request may make several. Only the event loop's thread uses it.

    `slots` requests run at once, and `max_queue` more may wait. `stopped` returns why the engine takes no more, or None.
    """

    def __init__(self, slots: int, max_queue: int, stopped: Callable[[], str | None]) -> None:
        self.slots, self.max_queue, self._stopped = slots, max_queue, stopped
        self.live = 0  # admitted requests that did not end
        self.draining = False  # the server ends with the last of them

    def check_open(self) -> None:
        """Raise ApiError where the engine has stopped, or the server ends."""
        if (why := self._stopped()) is not None:
            raise server_error(
                f"the engine has stopped ({why}); restart the server", status=503, code="engine_stopped"
            )
        if self.draining:
            text = "the server ends and takes no more requests; ask another one"
            raise server_error(text, status=503, code="draining")

    def admit_requests(self, count: int) -> Admission:
        """Admit `count` requests at once, as a context that they leave; raise ApiError where there is no room for them now or ever."""
        self.check_open()
        room = self.slots + self.max_queue
        if count > room:
            text = f"the request has {count} prompts and choices, and the server takes in {room} at once"
            sizes = f"batch_size={self.slots} and --max-queue {self.max_queue}"
            raise ApiError(f"{text} ({sizes}); send fewer", param="n")
        if self.live + count > room:
            raise ApiError(
                f"{self.live} requests run or wait, and the server takes in {room} at once; try again in {_WAIT} s",
                status=429,
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(_WAIT)},
            )
        return Admission(self, count)


class Admission(AbstractContextManager["Admission"]):
    """Admitted requests: each leaves when it has ended, the others at the end of the context."""

    def __init__(self, gate: Gate, count: int) -> None:
        self._gate, self._count = gate, count
        gate.live += count

    def leave_one(self) -> None:
        self._count -= 1
        self._gate.live -= 1

    def leave_all(self) -> None:
        self._gate.live -= self._count
        self._count = 0

    def __exit__(self, *_: object) -> None:
        self.leave_all()


@dataclass
class Bodies:
    """The count of the bytes of all bodies that are not token ids yet, and its limit."""

    most: int
    held: int = 0


class Body(AbstractContextManager["Body"]):
    """The bytes of one body, counted while its context is open."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._size = bodies, 0

    async def read_all(self, scope: Scope, receive: Receive) -> bytearray:
        """Return all of it; raise ApiError where it is too large, comes too slowly, or other bodies leave no room for it."""
        announced = Headers(scope=scope).get("content-length", "")
        self._check_size(int(announced) if announced.isdecimal() else 0)
        try:
            return await asyncio.wait_for(self._read_parts(receive), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise ApiError(f"the body did not come within {BODY_SECONDS:g} s; send it faster", status=408) from None

    async def _read_parts(self, receive: Receive) -> bytearray:
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part, more = message.get("body", b""), message.get("more_body", False)
            self._check_size(self._size + len(part))
            self._bodies.held += len(part)
            self._size += len(part)
            body += part
        return body

    def _check_size(self, size: int) -> None:
        if size > LARGEST_BODY:
            raise ApiError(f"the body has more than {LARGEST_BODY:,} bytes; send a shorter prompt", status=413)
        room = self._bodies.most * (1.0 if size <= SMALL_BODY else _SHARE_OF_LARGE)
        if self._bodies.held + size - self._size > room:
            raise server_error(
                f"the server holds {self._bodies.held:,} bytes of other requests; try again in {_WAIT} s",
                status=503,
                code="too_many_bytes",
                headers={"Retry-After": str(_WAIT)},
            )

    def __exit__(self, *_: object) -> None:
        self._bodies.held -= self._size
        self._size = 0


def read_object(body: bytearray) -> dict[str, Any]:
    """Return the JSON object of a body; raise ApiError where it is none."""
    values = 0
    for start in range(0, len(body), SMALL_BODY):  # short parts, between which other threads run
        values += sum(body.count(byte, start, start + SMALL_BODY) for byte in _COSTLY)
        if values > MOST_VALUES:
            raise ApiError(
                f"the body has more than {MOST_VALUES:,} values and escaped characters; send fewer at once, and text in UTF-8 without "
                f"escapes",
                status=413,
            )

    def refuse_constant(name: str) -> None:
        raise ApiError(f"the body is no JSON ({name} is no number of JSON); send an object")

    try:
        data = json.loads(body, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise ApiError(f"the body is no JSON ({error.msg} at character {error.pos}); send an object") from None
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is no UTF-8 (byte {error.start}); send JSON in UTF-8") from None
    except RecursionError:
        raise ApiError("the body is nested too deep; send objects and lists as OpenAI's API has them") from None
    except ValueError:  # Python's limit of digits
        raise ApiError("the body has a number of too many digits; send a shorter one") from None
    if not isinstance(data, dict):
        raise ApiError(f"the body is a JSON {type(data).__name__}; send an object")
    return data
