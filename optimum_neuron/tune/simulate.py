# SPDX-License-Identifier: Apache-2.0
"""A scheduler on a simulated clock: what the users get of an engine whose steps take so long. Runs no model; needs no torch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import numpy as np

from ..engine.request import Request
from ..engine.scheduler import Scheduler
from ..engine.statistics import Statistics
from ..engine.step import Step, TokenEvent
from ..graphs.spec import GraphSpec
from .answers import Answer, values_of


# Seconds of a step, which the scheduler has planned and not committed yet.
StepSeconds = Callable[[Step, Scheduler], float]
# Steps kept for a picture of how they follow each other.
TIMELINE_STEPS = 400


class Load(Protocol):
    """Who sends requests.

    Attributes:
        requests: how many are to finish; then the simulation ends.
        due: when the next ones are sent, ascending.
    """

    @property
    def requests(self) -> int: ...

    @property
    def due(self) -> deque[float]: ...

    def next_request(self) -> Request: ...

    def answered(self, now: float) -> None:
        """A request has finished: its user may send another one, by adding to `due`."""


@dataclass
class Outcome:
    """What a simulation measured, in simulated seconds.

    Attributes:
        answers: by request id, those that are not finished included.
        kinds: steps by kind.
        statistics: what an engine counts of its steps.
        timeline: start, duration and kind of some steps in a row.
        seconds: of the whole simulation.
        busy: of them, in which a step ran.
        finished: requests that have all of their tokens.
        finished_tokens, unfinished_tokens: generated for those, and for the others.
        longest_queue: requests that waited for a slot at a time, at most.
    """

    answers: dict[str, Answer] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    statistics: Statistics = field(default_factory=Statistics)
    timeline: list[tuple[float, float, str]] = field(default_factory=list)
    seconds: float = 0.0
    busy: float = 0.0
    finished: int = 0
    finished_tokens: int = 0
    unfinished_tokens: int = 0
    longest_queue: int = 0

    @property
    def ttft(self) -> np.ndarray:
        """Per request, from its arrival to its first token."""
        return values_of(self.answers.values(), "ttft")

    @property
    def queue(self) -> np.ndarray:
        """Per request, from its arrival to its first step."""
        return values_of(self.answers.values(), "queue")

    @property
    def itl(self) -> np.ndarray:
        """Per token but the first of a request: time since the one before."""
        return values_of(self.answers.values(), "itl")

    @property
    def padded(self) -> float:
        """Share of the computed prompt tokens that were padding."""
        counted = self.statistics
        return counted.padded_prompt_tokens / max(counted.padded_prompt_tokens + counted.prompt_tokens, 1)


def by_graph(seconds: Callable[[GraphSpec], float]) -> StepSeconds:
    """Steps that cost what their graph costs, however few of its rows and tokens are in use."""
    known = cache(seconds)
    return lambda step, scheduler: known(step.graph)


class Simulation:
    """One engine.

    Args:
        scheduler: without requests.
        seconds: of its steps.
        on_finish: called whenever a request finishes.
        on_step: called with each step before it is committed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        seconds: StepSeconds,
        load: Load,
        *,
        on_finish: Callable[[], None] = lambda: None,
        on_step: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self._scheduler, self._seconds, self._load = scheduler, seconds, load
        self._on_finish, self._on_step = on_finish, on_step
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Runs the scheduler until as many requests have finished as the load has.

        Raises:
            ValueError: a request could never be served.
        """
        outcome, scheduler, due = self._outcome, self._scheduler, self._load.due
        now = 0.0
        while outcome.finished < self._load.requests:
            while due and due[0] <= now:
                self._send(due.popleft())
            step = scheduler.schedule()
            if step is None:
                now = due[0]
                continue
            self._on_step(step)
            seconds = self._seconds(step, scheduler)
            self._count(step, now, seconds)
            now += seconds
            events = scheduler.commit(step, [0] * len(step.decodes), [0] * len(step.chunks), seconds)
            outcome.longest_queue = max(outcome.longest_queue, scheduler.waiting)
            self._take(events, now)
        outcome.seconds = now
        outcome.unfinished_tokens = sum(len(each.times) for each in outcome.answers.values()) - outcome.finished_tokens
        return outcome

    def _send(self, arrival: float) -> None:
        request = self._load.next_request()
        self._scheduler.add(request)
        self._outcome.answers[request.request_id] = Answer(arrival)

    def _count(self, step: Step, now: float, seconds: float) -> None:
        outcome = self._outcome
        outcome.kinds[step.graph.kind] += 1
        outcome.busy += seconds
        outcome.statistics.count_step(step)
        for chunk in step.chunks:
            if chunk.is_first and not chunk.preemptions:
                outcome.answers[chunk.request_id].begun = now
        # Half way through, the first rush is over and the last requests are not.
        if len(outcome.timeline) < TIMELINE_STEPS and 2 * outcome.finished >= self._load.requests:
            outcome.timeline.append((now, seconds, step.graph.kind))

    def _take(self, events: list[TokenEvent], now: float) -> None:
        outcome = self._outcome
        for event in events:
            answer = outcome.answers[event.request_id]
            answer.times.append(now)
            if event.finish_reason:
                outcome.finished += 1
                outcome.finished_tokens += len(answer.times)
                self._on_finish()
                self._load.answered(now)
