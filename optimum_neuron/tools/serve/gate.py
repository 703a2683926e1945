# SPDX-License-Identifier: Apache-2.0
"""Admission of requests: as many as run and may wait, and none once the server ends or its engine has stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from .errors import ApiError, server_error


# Longest seconds of Retry-After, and the share of the newest request in the mean time of a request.
_MOST_WAIT, _NEWEST = 60, 0.2


class Gate:
    """The count of requests to the engine, of which one HTTP request may make several. Only the event loop's thread uses it.

    Args:
        slots: requests that run at once.
        max_queue: further ones that may wait for a slot.
        stopped: reason why the engine takes no more requests; None where it does.

    Attributes:
        live: admitted requests that did not end.
        draining: True once the server ends with the last admitted request.
    """

    def __init__(self, slots: int, max_queue: int, stopped: Callable[[], str | None]) -> None:
        self.slots, self.max_queue = slots, max_queue
        self.live = 0
        self.draining = False
        self._stopped = stopped
        self._seconds = 0.0  # mean of a request

    def check_open(self) -> None:
        """Raise ApiError where the engine has stopped, or the server ends."""
        why = self._stopped()
        if why is not None:
            raise server_error(
                f"the engine has stopped ({why}); restart the server", status=503, code="engine_stopped"
            )
        if self.draining:
            raise server_error(
                "the server ends and takes no more requests; ask another one", status=503, code="draining"
            )

    def admit_requests(self, count: int) -> Admission:
        """Admit `count` requests at once, as a context that they leave.

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

    def note_seconds(self, seconds: float) -> None:
        """Note the time of a request, from its admission to its end."""
        self._seconds += (seconds - self._seconds) * (_NEWEST if self._seconds else 1.0)


class Admission:
    """Admitted requests: each leaves when it has ended, the others at the end of the context."""

    def __init__(self, gate: Gate, count: int) -> None:
        self._gate, self._count = gate, count
        self._start = time.perf_counter()
        gate.live += count

    def leave_one(self) -> None:
        """Let a request that has ended leave."""
        self._count -= 1
        self._gate.live -= 1
        self._gate.note_seconds(time.perf_counter() - self._start)

    def leave_all(self) -> None:
        """Let all others leave."""
        self._gate.live -= self._count
        self._count = 0

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave_all()
