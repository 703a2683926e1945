# SPDX-License-Identifier: Apache-2.0
"""A scheduler on a simulated clock: the answers that users get from steps of known times. Runs no model; needs no torch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan

import numpy as np

from ...core import Step
from ...engine.scheduler import Scheduler
from ...engine.statistics import Statistics
from .answers import Answer
from .trace import RequestTrace, traced_request


# Seconds of a step, which the scheduler has planned and not committed yet.
StepSeconds = Callable[[Step, Scheduler], float]


@dataclass
class Simulation:
    """Results of a simulation, in simulated seconds.

    Attributes:
        answers: answers to all requests, by id.
        kinds: number of steps by kind.
        statistics: an engine's counts of its steps.
        seconds, busy: length of the simulation, and the part of it in which a step ran.
        longest_queue: most requests that waited for a slot at a time.
    """

    answers: dict[str, Answer] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    statistics: Statistics = field(default_factory=Statistics)
    seconds: float = 0.0
    busy: float = 0.0
    longest_queue: int = 0

    def count_step(self, step: Step, now: float, seconds: float) -> None:
        """Add a step that begins now."""
        self.kinds[step.graph.kind] += 1
        self.busy += seconds
        self.statistics.count_step(step)
        for chunk in step.pieces:
            if chunk.is_first and isnan(self.answers[chunk.request_id].begun):
                self.answers[chunk.request_id].begun = now


def simulate(
    scheduler: Scheduler, seconds: StepSeconds, trace: RequestTrace, prompts: Sequence[np.ndarray]
) -> Simulation:
    """Serve a trace until all of its requests have finished: each comes at its time, whether others are answered or not.

    Args:
        scheduler: a scheduler without requests.
        seconds: times of its steps.
        prompts: prompts of the trace, as `RequestTrace.draw_prompts` makes them.

    Raises:
        ValueError: a request could never be served.
    """
    found, finished, now = Simulation(), 0, 0.0
    due = deque(enumerate(request.arrival for request in trace.requests))
    while finished < len(trace.requests):
        while due and due[0][1] <= now:
            number, arrival = due.popleft()
            request = traced_request(trace, prompts, number)
            scheduler.add_request(request)
            found.answers[request.request_id] = Answer(arrival)
        step = scheduler.schedule()
        if step is None:
            now = due[0][1]
            continue
        taken = seconds(step, scheduler)
        found.count_step(step, now, taken)
        now += taken
        events = scheduler.commit(step, [0] * len(step.decodes), [0] * len(step.pieces), taken)
        found.longest_queue = max(found.longest_queue, len(scheduler.queues.waiting))
        for event in events:
            found.answers[event.request_id].times.append(now)
            finished += event.finish_reason is not None
    found.seconds = now
    return found
