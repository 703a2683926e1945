# SPDX-License-Identifier: Apache-2.0
"""Steps in the memory that all processes map: one record starts a step in all of them, and the last one signals its end.

Events are eventfds, which all processes inherit: one write wakes every process, and the kernel counts who has run the step.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Sequence
from typing import Any

from .plan import HALVES


# Step n has place n % PLACES: a quick process waits for step n + HALVES while another runs step n, and needs another event.
PLACES = HALVES + 1
EVENTS = 2 * PLACES + 1
RECORD = 1024  # bytes; a step and its samplers take some hundred
WAITED, RAN, FAILED = range(3)


def board_bytes(world_size: int) -> int:
    """Return the size of a StepBoard's memory."""
    return PLACES * (RECORD + world_size)


class StepBoard:
    """Commands to run steps, as JSON by place, and a byte per place and process for how it ended one there.

    Of `events`, `go` are set while processes have a step to run, `others` count those that need not signal its end, `done` counts ended steps.
    """

    def __init__(self, memory: memoryview, events: Sequence[int]) -> None:
        size = len(memory) // PLACES
        self.records = [memory[place * size :][:RECORD] for place in range(PLACES)]
        self.ends = [memory[place * size :][RECORD:size] for place in range(PLACES)]
        self.go, self.others, self.done = events[:PLACES], events[PLACES:-1], events[-1]


class ParentSteps(StepBoard):
    """The parent's end; `poll` hears of the end of a step, and of those of processes that were registered with it."""

    def __init__(self, memory: memoryview) -> None:
        flags = os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self.events = [os.eventfd(0, flags) for _ in range(EVENTS)]
        super().__init__(memory, self.events)
        self.poll = select.epoll()
        self.poll.register(self.done, select.EPOLLIN)

    def start(self, number: int, command: dict[str, Any], processes: int) -> None:
        """Start a step in all processes. Steps are numbered from 0, and HALVES of them may be under way."""
        place = number % PLACES
        self.records[place][:] = json.dumps(command).encode().ljust(RECORD)
        self.ends[place][:] = bytes(len(self.ends[place]))
        os.eventfd_write(self.others[place], processes - 1)
        os.eventfd_write(self.go[place], 1)

    def wait(self, timeout: float) -> tuple[bool, list[int]]:
        """Wait until all have run the first step under way; return whether they have, and all that `poll` heard of."""
        ready = [event for event, _ in self.poll.poll(timeout)]
        if self.done in ready:
            os.eventfd_read(self.done)
        return self.done in ready, ready


class RankSteps(StepBoard):
    """A process's end: it runs steps in their order; `process` is its number, `channel` the descriptor of its other commands."""

    def __init__(self, memory: memoryview, events: Sequence[int], process: int, channel: int) -> None:
        super().__init__(memory, events)
        self._process, self._channel, self._number = process, channel, 0

    def wait_for_step(self) -> dict[str, Any] | None:
        """Return the command of the next step, or None where another one came first."""
        place, waiting = self._number % PLACES, select.poll()
        for event in (self.go[place], self._channel):
            waiting.register(event, select.POLLIN)
        is_step = any(event == self.go[place] for event, _ in waiting.poll())
        return json.loads(bytes(self.records[place])) if is_step else None

    def end_step(self, failed: bool) -> None:
        """Note how the step ended here; the last process to do so signals it. A failure's message is sent before."""
        place = self._number % PLACES
        self._number += 1
        self.ends[place][self._process] = FAILED if failed else RAN
        try:
            os.read(self.others[place], 8)
        except BlockingIOError:  # all others have counted themselves
            os.read(self.go[place], 8)
            os.write(self.done, (1).to_bytes(8, sys.byteorder))
