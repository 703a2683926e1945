# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: limits of a body's size, of all held bytes, and of the time that a body takes to come."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from .errors import ApiError, ClientGoneError, server_error


LARGEST_BODY = 16 * 2**20
# Values and escaped characters of a body. JSON's parser lets no other thread run until it is done, and these are what takes it time.
MOST_VALUES = 2**18
_COSTLY = b",[{\\"
# A body up to this size is read where it comes, and finds room where larger ones do not.
SMALL_BODY = 64 * 2**10
HELD_BYTES = 4 * LARGEST_BODY
# Seconds for a whole body to come.
BODY_SECONDS = 30.0
# The share of the held bytes that larger bodies may take.
_SHARE_OF_LARGE = 0.75
_WAIT = 5


class Bodies:
    """The count of the bytes of all bodies that are not token ids yet.

    Args:
        most: largest count.
    """

    def __init__(self, most: int) -> None:
        self.held = 0
        self._most = most

    def room_left(self, size: int) -> int:
        """Return the bytes that are left for a body of this size."""
        return int(self._most * (1.0 if size <= SMALL_BODY else _SHARE_OF_LARGE)) - self.held


class Body:
    """The bytes of one body, counted while its context is open."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size = 0

    async def read_all(self, scope: Scope, receive: Receive) -> bytearray:
        """Return all of it.

        Raises:
            ApiError: it is too large, comes too slowly, or other bodies leave no room for it.
            ClientGoneError: the client closed its connection before its end.
        """
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
        if size - self._size > self._bodies.room_left(size):
            raise server_error(
                f"the server holds {self._bodies.held:,} bytes of other requests; try again in {_WAIT} s",
                status=503,
                code="too_many_bytes",
                headers={"Retry-After": str(_WAIT)},
            )

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.held -= self._size
        self._size = 0


def read_object(body: bytearray) -> dict[str, Any]:
    """Return the JSON object of a body; raise ApiError where it is none."""
    _check_values(body)
    try:
        data = json.loads(body, parse_constant=_refuse_constant)
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


def _check_values(body: bytearray) -> None:
    """Count in short parts, between which other threads run."""
    values = 0
    for start in range(0, len(body), SMALL_BODY):
        values += sum(body.count(byte, start, start + SMALL_BODY) for byte in _COSTLY)
        if values > MOST_VALUES:
            raise ApiError(
                f"the body has more than {MOST_VALUES:,} values and escaped characters; send fewer at once, and text in UTF-8 without "
                f"escapes",
                status=413,
            )


def _refuse_constant(name: str) -> None:
    raise ApiError(f"the body is no JSON ({name} is no number of JSON); send an object")
