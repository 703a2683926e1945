# SPDX-License-Identifier: Apache-2.0
"""A scheduler on a simulated clock: who sends requests, and what the users get. Runs no model."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from optimum_neuron.config import NeuronConfig
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.engine.request import Request
from optimum_neuron.engine.scheduler import Scheduler
from optimum_neuron.engine.statistics import Statistics
from optimum_neuron.engine.step import Step, TokenEvent
from optimum_neuron.graphs.spec import GraphSpec


VOCABULARY = 32_000
# Steps kept for a picture of how they follow each other.
TIMELINE_STEPS = 400


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Who asks for what.

    Attributes:
        requests: how many are to finish; then the simulation ends.
        users: closed loop: each sends its next request when its last one finished. 0: open loop.
        rate: open loop: requests per second, at exponentially distributed intervals.
        ramp_s: seconds over which the users' first requests spread evenly.
        prompt_tokens, new_tokens: means of normal distributions.
        spread: their standard deviation, as a share of the mean.
        prompt_quantiles, new_quantiles: lengths at evenly spaced probabilities from 0 to 1, in place of those distributions.
        shared_prefix: tokens with which all prompts start alike; 0 also turns off the search for such prefixes.
        seed: of lengths and arrivals.
    """

    requests: int
    users: int = 0
    rate: float = 0.0
    ramp_s: float = 0.0
    prompt_tokens: int = 1500
    new_tokens: int = 250
    spread: float = 0.2
    prompt_quantiles: tuple[int, ...] = ()
    new_quantiles: tuple[int, ...] = ()
    shared_prefix: int = 0
    seed: int = 0


@dataclass
class Outcome:
    """What a simulation measured, in simulated seconds.

    Attributes:
        ttft, queue: per request: from its arrival to its first token, and to its first step.
        itl: per token but the first of a request: time since the one before.
        kinds: steps by kind.
        timeline: start, duration and kind of some steps in a row.
        busy: time in which a step ran.
        finished_tokens, unfinished_tokens: generated for requests that finished, and for those that did not.
    """

    ttft: array[float] = field(default_factory=lambda: array("d"))
    queue: array[float] = field(default_factory=lambda: array("d"))
    itl: array[float] = field(default_factory=lambda: array("d"))
    kinds: Counter[str] = field(default_factory=Counter)
    statistics: Statistics = field(default_factory=Statistics)
    timeline: list[tuple[float, float, str]] = field(default_factory=list)
    seconds: float = 0.0
    busy: float = 0.0
    finished: int = 0
    finished_tokens: int = 0
    unfinished_tokens: int = 0


class _Traffic:
    """Makes the requests of a workload. The n-th one is the same whatever serves it."""

    def __init__(self, workload: Workload, config: NeuronConfig) -> None:
        self._workload = workload
        # Users go on when the last requests finish, several of them in one step.
        most = workload.requests + 2 * workload.users
        random = np.random.default_rng(workload.seed)
        room = config.sequence_length
        new = _lengths(random, workload.new_tokens, workload.spread, workload.new_quantiles, most).clip(2, room)
        prompts = _lengths(random, workload.prompt_tokens, workload.spread, workload.prompt_quantiles, most).clip(
            1, room
        )
        self._new = new
        self._prompts = np.minimum(prompts, room - new + 1)
        self._tokens = random.integers(0, VOCABULARY, room, np.int32)
        first = (np.arange(workload.users) * (workload.ramp_s / max(workload.users, 1))).tolist()
        if workload.rate:
            first = np.cumsum(random.exponential(1 / workload.rate, workload.requests)).tolist()
        self.due: deque[float] = deque(first)
        self._sent = 0

    def next_request(self) -> Request:
        index, self._sent = self._sent, self._sent + 1
        prompt = self._tokens[: self._prompts[index]]
        shared = self._workload.shared_prefix
        if shared:
            prompt = prompt.copy()
            prompt[min(shared, len(prompt) - 1)] = VOCABULARY + index
        return Request(request_id=str(index), prompt_token_ids=prompt, max_new_tokens=int(self._new[index]))

    def new_tokens(self, request_id: str) -> int:
        """Tokens that a request asked for."""
        return int(self._new[int(request_id)])


def _lengths(
    random: np.random.Generator, mean: int, spread: float, quantiles: tuple[int, ...], number: int
) -> np.ndarray:
    if quantiles:
        found = np.interp(random.random(number), np.linspace(0, 1, len(quantiles)), quantiles)
    else:
        found = random.normal(mean, mean * spread, number)
    return np.rint(found).astype(np.int64)


class Simulation:
    """One engine.

    Args:
        seconds: of a step of each graph, however few of its rows and tokens are in use.
        on_finish: called whenever a request finishes.

    Raises:
        ValueError: the scheduler refuses the options.
    """

    def __init__(
        self,
        config: NeuronConfig,
        options: SchedulerOptions,
        seconds: Callable[[GraphSpec], float],
        workload: Workload,
        on_finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._workload = config, workload
        self._seconds = cache(seconds)
        self._on_finish = on_finish
        self._scheduler = Scheduler(config, options)
        self._traffic = _Traffic(workload, config)
        self._arrivals: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Runs the scheduler until the workload's requests have finished."""
        outcome, scheduler, due = self._outcome, self._scheduler, self._traffic.due
        tokens = [0] * self._config.batch_size
        now = 0.0
        while outcome.finished < self._workload.requests:
            while due and due[0] <= now:
                self._send(due.popleft())
            step = scheduler.schedule()
            if step is None:
                now = due[0]
                continue
            seconds = self._seconds(step.graph)
            self._count(step, now, seconds)
            now += seconds
            events = scheduler.commit(step, tokens[: len(step.decodes)], tokens[: len(step.chunks)], seconds)
            self._take(events, now)
        outcome.seconds = now
        outcome.unfinished_tokens = sum(len(scheduler.state(name).output_token_ids) for name in self._latest)
        return outcome

    def _send(self, arrival: float) -> None:
        request = self._traffic.next_request()
        self._arrivals[request.request_id] = arrival
        self._scheduler.add(request)

    def _count(self, step: Step, now: float, seconds: float) -> None:
        outcome = self._outcome
        outcome.kinds[step.graph.kind] += 1
        outcome.busy += seconds
        outcome.statistics.count_step(step)
        for chunk in step.chunks:
            if chunk.is_first and not chunk.preemptions:
                outcome.queue.append(now - self._arrivals[chunk.request_id])
        # Half way through, the first rush is over and the last requests are not.
        if len(outcome.timeline) < TIMELINE_STEPS and 2 * outcome.finished >= self._workload.requests:
            outcome.timeline.append((now, seconds, step.graph.kind))

    def _take(self, events: list[TokenEvent], now: float) -> None:
        outcome, latest = self._outcome, self._latest
        for event in events:
            name = event.request_id
            if name in latest:
                outcome.itl.append(now - latest[name])
            else:
                outcome.ttft.append(now - self._arrivals[name])
            latest[name] = now
            if event.finish_reason:
                del latest[name], self._arrivals[name]
                outcome.finished += 1
                outcome.finished_tokens += self._traffic.new_tokens(name)
                self._on_finish()
                if self._workload.users:
                    self._send(now)
