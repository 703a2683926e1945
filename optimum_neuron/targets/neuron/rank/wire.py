# SPDX-License-Identifier: Apache-2.0
"""Messages between a rank and its parent, through a socket pair: a head with sizes, JSON, bytes."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


_MARK = b"RANK"
_HEAD = struct.Struct("<4sIQ")  # the mark, the bytes of JSON, the bytes of data
_LARGEST_JSON = 1 << 28


class WireError(Exception):
    """The other side sent what is no message."""


class Channel:
    """One end of a socket pair."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: dict[str, Any], data: bytes = b"", timeout: float | None = None) -> None:
        """Send a message with data; raise OSError where the other side has not taken it within `timeout` seconds."""
        text = json.dumps(message).encode()
        self._socket.settimeout(timeout)
        self._socket.sendall(_HEAD.pack(_MARK, len(text), len(data)) + text)
        if data:  # with nothing left to read, the other side may have closed its end
            self._socket.sendall(data)

    def receive(self, timeout: float | None = None, most: int | None = None) -> tuple[dict[str, Any], bytearray]:
        """Return the next message, whole, and its data, of `most` bytes.

        Raise EOFError where the other side has closed its end, TimeoutError where the message has not ended within `timeout` seconds,
        and WireError where it is none.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        head = self._read_bytes(_HEAD.size, deadline)
        mark, length, size = _HEAD.unpack(head)
        if mark != _MARK or length > _LARGEST_JSON or (most is not None and size > most):
            raise WireError(f"a message cannot begin with {bytes(head)!r}")
        text, message = self._read_bytes(length, deadline), None
        with suppress(ValueError):
            message = json.loads(text)
        if not isinstance(message, dict):
            raise WireError(f"{bytes(text[:80])!r} is no JSON object")
        return message, self._read_bytes(size, deadline)

    def _read_bytes(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            # Zero would make the socket non-blocking.
            self._socket.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
            count = 0
            with suppress(ConnectionResetError):
                count = self._socket.recv_into(view[done:])
            if count == 0:
                raise EOFError
            done += count
        return data


class RankError(Exception):
    """A failure of a runtime or its package, `missing` where that could not be imported, while something was done."""

    def __init__(self, doing: str, error: Exception) -> None:
        super().__init__(str(error).strip() or type(error).__name__)
        self.doing = doing
        self.missing = isinstance(error, ImportError)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Name what was done when something inside raised."""
    try:
        yield
    except RankError:
        raise
    except Exception as error:
        raise RankError(what, error) from error
