# SPDX-License-Identifier: Apache-2.0
"""Who may come in: as many as run and may wait, and nobody once the server ends or its engine has stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from .errors import ApiError, failed


# Seconds that a client is told to wait: at most a minute, and this share of the mean is the newest request's.
_MOST_WAIT, _NEWEST = 60, 0.2


class Gate:
    """Counts requests to the engine, of which one HTTP request may make several. Used by the event loop's thread alone.

    Args:
        slots: requests that run at once.
        max_queue: further ones that may wait for a slot.
        stopped: why the engine takes no more requests; None where it does.

    Attributes:
        live: requests that came in and did not end.
        draining: nobody comes in any more, and the server ends with the last who is in.
    """

    def __init__(self, slots: int, max_queue: int, stopped: Callable[[], str | None]) -> None:
        self.slots, self.max_queue = slots, max_queue
        self.live = 0
        self.draining = False
        self._stopped = stopped
        self._seconds = 0.0  # that a request takes

    def check_open(self) -> None:
        """Raises ApiError where the engine has stopped, or the server ends."""
        why = self._stopped()
        if why is not None:
            raise failed(f"the engine has stopped ({why}); restart the server", status=503, code="engine_stopped")
        if self.draining:
            raise failed("the server ends and takes no more requests; ask another one", status=503, code="draining")

    def admit(self, count: int) -> Admission:
        """Lets in `count` requests at once, as a context that they leave.

        Raises:
            ApiError: there is no room for them now, or there never is, or the server is closed.
        """
        self.check_open()
        room = self.slots + self.max_queue
        if count > room:
            raise ApiError(
                f"the request has {count} prompts and choices, and the server takes in {room} at once (batch_size={self.slots} and "
                f"--max-queue {self.max_queue}); send fewer",
                param="n",
            )
        if self.live + count > room:
            wait = max(1, min(_MOST_WAIT, math.ceil(self._seconds * (self.live - self.slots + count) / self.slots)))
            raise ApiError(
                f"{self.live} requests run or wait, and the server takes in {room} at once; try again in {wait} s",
                status=429,
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(wait)},
            )
        return Admission(self, count)

    def note(self, seconds: float) -> None:
        """What a request took, from its admission to its end."""
        self._seconds += (seconds - self._seconds) * (_NEWEST if self._seconds else 1.0)


class Admission:
    """Requests that were let in: each leaves when it has ended, the others at the end of the context."""

    def __init__(self, gate: Gate, count: int) -> None:
        self._gate, self._count = gate, count
        self._start = time.perf_counter()
        gate.live += count

    def leave(self) -> None:
        """One of them has ended."""
        self._count -= 1
        self._gate.live -= 1
        self._gate.note(time.perf_counter() - self._start)

    def close(self) -> None:
        """All that are left leave."""
        self._gate.live -= self._count
        self._count = 0

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
