# SPDX-License-Identifier: Apache-2.0
"""The candidate that serves a trace best: all that can be exported are simulated and ranked. Needs no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...config import NeuronConfig
from ...engine.policy import SchedulerOptions
from ...engine.scheduler import Scheduler
from ...step.spec import graph_specs
from .candidates import Candidate
from .simulate import StepClock, simulate
from .slo import Figures, Limit, Slo
from .trace import RequestTrace


# Of those that meet all limits: throughputs that differ by less than a hundredth, and shares of limits that differ by less than
# a twentieth, are as good as one another; then fewer minutes of compiling decide.
THROUGHPUT_STEP, LIMIT_STEP = 0.01, 0.05


class Machine(ABC):
    """The hardware that graphs run on."""

    is_measured: bool  # or its times are predicted
    about: Sequence[str]  # sentences about the sources of times, and what they leave out
    reuses_prefixes: bool  # without copies of slots' states

    @abstractmethod
    def memory(self, config: NeuronConfig) -> tuple[int, int]:
        """Return the bytes that a config needs of one core, or of the host, and those that there are."""

    @abstractmethod
    def compile_minutes(self, config: NeuronConfig) -> float:
        """Return the minutes that compiling all graphs takes, one after the other."""

    @abstractmethod
    def step_clock(self, config: NeuronConfig) -> StepClock:
        """Return the times of a config's steps."""


@dataclass(frozen=True)
class CandidateResult:
    """One candidate, simulated."""

    candidate: Candidate
    figures: Figures
    used: dict[Limit, float]  # share of each limit that was taken; above 1 it was missed
    attainment: float  # share of requests that kept all limits each
    graphs: int
    compile_minutes: float
    memory: int
    padded: float  # share of the computed prompt tokens that were padding
    rows_used: float  # share of the decode rows of steps that advanced a request
    busy: float  # share of the time in which a step ran
    longest_queue: int
    steps: dict[str, int]  # number of steps by kind

    @property
    def meets(self) -> bool:
        return all(share <= 1 for share in self.used.values())

    @property
    def worst(self) -> float:
        """The taken share of the tightest limit; 0 without limits."""
        return max(self.used.values(), default=0.0)

    @property
    def goodput(self) -> float:
        return self.attainment * self.figures.req_s


class Pruned(NamedTuple):
    """A candidate that was not simulated, and the reason."""

    candidate: Candidate
    why: str


class Search(NamedTuple):
    """Results, the best first, and candidates that were left out."""

    results: tuple[CandidateResult, ...]
    pruned: tuple[Pruned, ...]

    @property
    def best(self) -> CandidateResult:
        return self.results[0]


def search_sizes(
    candidates: Sequence[Candidate],
    machine: Machine,
    trace: RequestTrace,
    slo: Slo,
    *,
    compile_budget: float | None = None,
    advance: Callable[[str], None] = lambda description: None,
) -> Search:
    """Simulate all candidates that fit; raise ValueError where none fits into memory, or into the budget of minutes."""
    results, pruned, prompts = list[CandidateResult](), list[Pruned](), trace.draw_prompts()
    for candidate in candidates:
        needed, there = machine.memory(candidate.config)
        minutes = machine.compile_minutes(candidate.config)
        if needed > there:
            why = f"needs {needed / 2**30:,.1f} GiB of {there / 2**30:,.1f} GiB of memory"
            pruned.append(Pruned(candidate, why))
        elif compile_budget is not None and minutes > compile_budget:
            pruned.append(Pruned(candidate, f"takes {minutes:,.1f} of {compile_budget:g} minutes to compile"))
        else:
            results.append(_simulate_candidate(candidate, machine, trace, slo, prompts))
        advance(str(candidate))
    if not results:
        raise ValueError(
            f"none of {len(pruned)} candidates can be exported: {pruned[0].candidate} {pruned[0].why}; search smaller sizes, or raise "
            f"--compile-budget or --tensor-parallel-size"
        )
    return Search(tuple(_rank_results(results)), tuple(pruned))


def _simulate_candidate(
    candidate: Candidate, machine: Machine, trace: RequestTrace, slo: Slo, prompts: Sequence[np.ndarray]
) -> CandidateResult:
    config = candidate.config
    # As `serve` has them; where no two prompts start alike, reuse changes no step, and is not looked for.
    options = SchedulerOptions(prefix_reuse=trace.shares_prefixes)
    places = None if machine.reuses_prefixes else config.state_places
    scheduler = Scheduler(config, options, state_places=places)
    simulation = simulate(scheduler, machine.step_clock(config).draw_times(), trace, prompts)
    answers, counted = list(simulation.answers.values()), simulation.statistics
    return CandidateResult(
        candidate=candidate,
        figures=Figures.from_answers(answers),
        used=slo.shares_used(answers),
        attainment=slo.attainment(answers),
        graphs=len(graph_specs(config)),
        compile_minutes=machine.compile_minutes(config),
        memory=machine.memory(config)[0],
        padded=counted.padded_prompt_tokens / max(counted.padded_prompt_tokens + counted.prompt_tokens, 1),
        rows_used=counted.decode_tokens / max(counted.decode_tokens + counted.idle_decode_rows, 1),
        busy=simulation.busy / simulation.seconds,
        longest_queue=simulation.longest_queue,
        steps=dict(simulation.kinds),
    )


def _rank_results(results: Sequence[CandidateResult]) -> list[CandidateResult]:
    """Sort by throughput, then by room below the limits, then by minutes of compiling; after them those that miss one, by how far."""
    most = max(result.figures.tok_s for result in results)

    def sort_key(result: CandidateResult) -> tuple[float, ...]:
        if not result.meets:
            return 1.0, result.worst, -result.figures.tok_s, result.compile_minutes
        throughput = round(result.figures.tok_s / most / THROUGHPUT_STEP)
        return 0.0, -throughput, round(result.worst / LIMIT_STEP), result.compile_minutes

    return sorted(results, key=sort_key)
