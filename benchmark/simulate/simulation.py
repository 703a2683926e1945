# SPDX-License-Identifier: Apache-2.0
"""Who sends requests to a simulated engine: users, or requests at random times, with lengths of a distribution."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from optimum_neuron.config import NeuronConfig
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.engine.request import Request
from optimum_neuron.engine.scheduler import Scheduler
from optimum_neuron.graphs.spec import GraphSpec
from optimum_neuron.tune.simulate import Outcome, Simulation, by_graph


VOCABULARY = 32_000


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


class _Traffic:
    """Makes the requests of a workload. The n-th one is the same whatever serves it."""

    def __init__(self, workload: Workload, config: NeuronConfig) -> None:
        self._workload = workload
        self.requests = workload.requests
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

    def answered(self, now: float) -> None:
        if self._workload.users:
            insort(self.due, now)


def _lengths(
    random: np.random.Generator, mean: int, spread: float, quantiles: tuple[int, ...], number: int
) -> np.ndarray:
    if quantiles:
        found = np.interp(random.random(number), np.linspace(0, 1, len(quantiles)), quantiles)
    else:
        found = random.normal(mean, mean * spread, number)
    return np.rint(found).astype(np.int64)


def simulate(
    config: NeuronConfig,
    options: SchedulerOptions,
    seconds: Callable[[GraphSpec], float],
    workload: Workload,
    on_finish: Callable[[], None] = lambda: None,
) -> Outcome:
    """What users get of one engine.

    Args:
        seconds: of a step of each graph, however few of its rows and tokens are in use.
        on_finish: called whenever a request finishes.

    Raises:
        ValueError: the scheduler refuses the options.
    """
    scheduler = Scheduler(config, options)
    return Simulation(scheduler, by_graph(seconds), _Traffic(workload, config), on_finish=on_finish).run()
