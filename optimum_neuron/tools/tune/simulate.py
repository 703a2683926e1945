# SPDX-License-Identifier: Apache-2.0
"""A scheduler on a simulated clock: the answers that users get from steps of known times. Runs no model; needs no torch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from math import isnan

import numpy as np

from ...core import Step
from ...engine.scheduler import Scheduler
from ...engine.statistics import Statistics
from ...step.family import rows_needed
from ...step.spec import GraphSpec
from .slo import Answer
from .trace import RequestTrace, traced_request


# Seconds of a step, which the scheduler has planned and not committed yet.
StepSeconds = Callable[[Step, Scheduler], float]


@dataclass
class Simulation:
    """Results of a simulation, in simulated seconds."""

    answers: dict[str, Answer] = field(default_factory=dict)  # by id of the request
    kinds: Counter[str] = field(default_factory=Counter)  # number of steps by kind
    statistics: Statistics = field(default_factory=Statistics)  # an engine's counts of its steps
    seconds: float = 0.0
    busy: float = 0.0  # the part of them in which a step ran
    longest_queue: int = 0  # most requests that waited for a slot at a time


def simulate(
    scheduler: Scheduler, seconds: StepSeconds, trace: RequestTrace, prompts: Sequence[np.ndarray]
) -> Simulation:
    """Serve a trace until all of its requests have finished: each comes at its time, whether others are answered or not. The scheduler
    has no requests yet. Raise ValueError where a request could never be served."""
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
        found.kinds[step.graph.kind] += 1
        found.busy += taken
        found.statistics.count_step(step)
        for chunk in step.pieces:
            if chunk.is_first and isnan(found.answers[chunk.request_id].begun):
                found.answers[chunk.request_id].begun = now
        now += taken
        events = scheduler.commit(step, [0] * len(step.decodes), [0] * len(step.pieces), taken)
        found.longest_queue = max(found.longest_queue, len(scheduler.queues.waiting))
        for event in events:
            found.answers[event.request_id].times.append(now)
            finished += event.finish_reason is not None
    found.seconds = now
    return found


class StepClock:
    """Times of one config's steps: a step takes what its graph takes, whatever is in use of it."""

    def __init__(self, graphs: tuple[GraphSpec, ...], seconds: Callable[[GraphSpec], float]) -> None:
        self._seconds = {graph: seconds(graph) for graph in graphs}

    def draw_times(self) -> StepSeconds:
        """Return the times of steps as they come, some slower than others; the same at each call."""
        return lambda step, scheduler: self._seconds[step.graph]


@dataclass(frozen=True)
class Curve:
    """Measured values at ascending places, with straight lines in between, and the nearest value beyond."""

    places: Sequence[int]
    values: Sequence[float] | np.ndarray

    def __call__(self, place: int) -> float:
        return float(np.interp(place, self.places, self.values))


@dataclass(frozen=True, kw_only=True)
class ChunkCurves:
    """Seconds of steps with chunks of one size; places of all curves are prompt tokens up to the last live one."""

    alone: Curve  # a prompt's first tokens, in a step without decode rows
    mixed: Curve | None  # the same in a mixed step with all decode rows in use, which see nothing
    unread: Curve  # less where no chunk ends its prompt, so that no output is needed
    column: Curve  # for each token and column before the chunk


@dataclass(frozen=True, kw_only=True)
class CpuClock(StepClock):
    """Seconds on a CPU, which computes the tokens of a step up to the last live one, and attends to what each of them sees."""

    decode: Curve  # by rows up to the last that decodes, a step with rows that see nothing
    decode_column: Curve  # by the same, for each column that a row sees
    chunks: Mapping[int, ChunkCurves]  # by chunk size
    host: Curve  # by requests of a step, the engine's own time
    copied_token: float  # for each token of a prefix that is copied from slot to slot
    ratios: tuple[float, ...] = (1.0,)  # runs over the median of their step: something else may want a core
    woken: float = 0.0  # more in the first step after a pause, in which cores and threads went to sleep
    turned: float = 0.0  # more in a step that only decodes, after one with chunks, which had the caches

    def draw_times(self) -> StepSeconds:
        ratios = cycle(np.random.default_rng(0).permutation(self.ratios).tolist())
        before: GraphSpec | None = None

        def seconds(step: Step, scheduler: Scheduler) -> float:
            nonlocal before
            total = self.time_step(step, scheduler)
            if not len(scheduler.queues.running) and not len(scheduler.queues.prefilling):
                total += self.woken
            elif before is not None and before.has_chunk and not step.graph.has_chunk:
                total += self.turned
            before = step.graph
            return next(ratios) * total

        return seconds

    def time_step(self, step: Step, scheduler: Scheduler) -> float:
        """Return the seconds of a step that the scheduler has planned and not committed yet."""
        graph = step.graph
        rows = graph.batch_size if graph.has_chunk else max((decode.slot for decode in step.decodes), default=0) + 1
        columns = sum(scheduler.queues.live[decode.request_id].context for decode in step.decodes)
        total = self.host(len(step.decodes) + len(step.pieces)) + self.decode_column(rows) * columns
        if not graph.has_chunk:
            return total + self.decode(rows)
        times = self.chunks[graph.chunk_size]
        # Tokens of chunk rows up to the last live one: a row is filled before the next one, and holds one prompt.
        rows = rows_needed([chunk.count for chunk in step.pieces], graph.chunk_size)
        live = (rows - 1) * graph.chunk_size + (step.pieces[-1].count - 1) % graph.chunk_size + 1
        total += times.column(live) * sum(chunk.count * chunk.start for chunk in step.pieces)
        total += self.copied_token * sum(copy.length for copy in step.copies)
        if graph.kind == "mixed":
            assert times.mixed is not None
            return total + times.mixed(live)
        return total + times.alone(live) - (0.0 if any(chunk.is_last for chunk in step.pieces) else times.unread(live))
