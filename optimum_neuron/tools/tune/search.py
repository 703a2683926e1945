# SPDX-License-Identifier: Apache-2.0
"""Which candidate serves a trace best: what cannot is left out, the others are simulated and ranked. Measures nothing; needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ...config import NeuronConfig
from ...engine.policy import SchedulerOptions
from ...engine.scheduler import Scheduler
from ...step.spec import graph_specs
from .answers import Figures
from .candidates import Candidate
from .simulate import simulate
from .slo import Limit, Slo
from .step_times import StepTimes
from .trace import Trace, least_chunk_steps


# Of those that meet all limits: throughputs that differ by less than a hundredth, and shares of limits that differ by less than
# a twentieth, are as good as one another; then fewer minutes of compiling decide.
THROUGHPUT_STEP, LIMIT_STEP = 0.01, 0.05


class Machine(Protocol):
    """What graphs run on.

    Attributes:
        measured: whether times were measured on it, or are predicted.
        about: sentences about where times come from, and what they leave out.
    """

    @property
    def measured(self) -> bool: ...

    @property
    def about(self) -> Sequence[str]: ...

    def memory(self, config: NeuronConfig) -> tuple[int, int]:
        """Bytes that a config needs of one core, or of the host, and that there are."""

    def compile_minutes(self, config: NeuronConfig) -> float:
        """Return the minutes that compiling all graphs takes, one after the other."""

    def snapshots(self, config: NeuronConfig) -> int | None:
        """As in `Scheduler`."""

    def times(self, config: NeuronConfig) -> StepTimes:
        """Of its steps."""


@dataclass(frozen=True)
class Result:
    """One candidate, simulated.

    Attributes:
        used: by limit, the share of it that was taken; above 1 it was missed.
        attainment: share of requests that kept all limits each.
        padded: share of the computed prompt tokens that were padding.
        rows_used: share of the decode rows of steps that advanced a request.
        busy: share of the time in which a step ran.
    """

    candidate: Candidate
    figures: Figures
    used: dict[Limit, float]
    attainment: float
    graphs: int
    compile_minutes: float
    memory: int
    padded: float
    rows_used: float
    busy: float
    longest_queue: int
    steps: dict[str, int] = field(default_factory=dict)

    @property
    def meets(self) -> bool:
        return all(share <= 1 for share in self.used.values())

    @property
    def worst(self) -> float:
        """Of the limit that is the tightest, the share that was taken; 0 without limits."""
        return max(self.used.values(), default=0.0)

    @property
    def goodput(self) -> float:
        """Requests per second that kept all limits."""
        return self.attainment * self.figures.req_s


@dataclass(frozen=True)
class Pruned:
    """A candidate that was not simulated, and why."""

    candidate: Candidate
    why: str


@dataclass(frozen=True)
class Search:
    """Results, the best first, and what was left out."""

    results: tuple[Result, ...]
    pruned: tuple[Pruned, ...]

    @property
    def best(self) -> Result:
        return self.results[0]


def search(
    candidates: Sequence[Candidate],
    machine: Machine,
    trace: Trace,
    slo: Slo,
    *,
    compile_budget: float | None = None,
    advance: Callable[[str], None] = lambda description: None,
    prune: bool = True,
) -> Search:
    """Simulates all candidates that may be the best.

    Args:
        compile_budget: minutes; None: any.
        advance: called with each candidate that is done, simulated or not.
        prune: whether candidates are left out that are known to miss a limit before they are simulated. Where all are, the
            one that may come nearest is simulated all the same. This changes no best candidate that meets all limits.

    Raises:
        ValueError: no candidate fits into memory, or into the budget.
    """
    fitting, pruned = _fitting(candidates, machine, compile_budget)
    simulated, hopeless = fitting, list[Pruned]()
    if prune:
        simulated, hopeless = _hopeful(fitting, machine, trace, slo)
    for _ in (*pruned, *hopeless):
        advance("left out")
    prompts = trace.prompts()
    results = []
    for candidate in simulated:
        results.append(_serve(candidate, machine, trace, slo, prompts))
        advance(str(candidate))
    return Search(tuple(rank(results)), (*pruned, *hopeless))


def _serve(candidate: Candidate, machine: Machine, trace: Trace, slo: Slo, prompts: Sequence[np.ndarray]) -> Result:
    """What the users of a trace get of one candidate."""
    config = candidate.config
    # As `serve` has them; where no two prompts start alike, reuse changes no step, and is not looked for.
    options = SchedulerOptions(prefix_reuse=trace.shares_prefixes)
    scheduler = Scheduler(config, options, snapshots=machine.snapshots(config))
    outcome = simulate(scheduler, machine.times(config).drawn(), trace, prompts)
    answers, counted = list(outcome.answers.values()), outcome.statistics
    return Result(
        candidate=candidate,
        figures=Figures.of(answers),
        used=slo.used(answers),
        attainment=slo.attainment(answers),
        graphs=len(graph_specs(config)),
        compile_minutes=machine.compile_minutes(config),
        memory=machine.memory(config)[0],
        padded=counted.padded_prompt_tokens / max(counted.padded_prompt_tokens + counted.prompt_tokens, 1),
        rows_used=counted.decode_tokens / max(counted.decode_tokens + counted.idle_decode_rows, 1),
        busy=outcome.busy / outcome.seconds,
        longest_queue=outcome.longest_queue,
        steps=dict(outcome.kinds),
    )


def rank(results: Iterable[Result]) -> list[Result]:
    """The best first: what meets all limits by throughput, then by room below the limits, then by minutes of compiling; behind
    them what misses one, by how far. Equals stay in their order."""
    found = list(results)
    most = max((result.figures.tok_s for result in found), default=1.0)

    def key(result: Result) -> tuple[float, ...]:
        if not result.meets:
            return 1.0, result.worst, -result.figures.tok_s, result.compile_minutes
        throughput = round(result.figures.tok_s / most / THROUGHPUT_STEP)
        return 0.0, -throughput, round(result.worst / LIMIT_STEP), result.compile_minutes

    return sorted(found, key=key)


def _fitting(
    candidates: Sequence[Candidate], machine: Machine, budget: float | None
) -> tuple[list[Candidate], list[Pruned]]:
    fitting, pruned = [], []
    for candidate in candidates:
        needed, there = machine.memory(candidate.config)
        if needed > there:
            why = f"needs {needed / 2**30:,.1f} GiB of {there / 2**30:,.1f} GiB of memory"
        elif budget is not None and (minutes := machine.compile_minutes(candidate.config)) > budget:
            why = f"takes {minutes:,.1f} of {budget:g} minutes to compile"
        else:
            fitting.append(candidate)
            continue
        pruned.append(Pruned(candidate, why))
    if not fitting:
        nearest = pruned[0]
        raise ValueError(
            f"none of {len(pruned)} candidates can be exported: {nearest.candidate} {nearest.why}; search smaller sizes, or raise "
            f"--compile-budget or --tensor-parallel-size"
        )
    return fitting, pruned


def _hopeful(
    candidates: Sequence[Candidate], machine: Machine, trace: Trace, slo: Slo
) -> tuple[list[Candidate], list[Pruned]]:
    """Candidates whose steps are not too slow for the limits, whatever the scheduler does."""
    bounds = [least_used(candidate, machine, trace, slo) for candidate in candidates]
    worst = [max(bound.values(), default=0.0) for bound in bounds]
    kept = max(1.0, min(worst))
    hopeful, pruned = [], []
    for candidate, bound, share in zip(candidates, bounds, worst, strict=True):
        if share <= kept * (1 + 1e-9):  # sums of times are rounded
            hopeful.append(candidate)
            continue
        limit = max(bound, key=lambda each: bound[each])
        pruned.append(Pruned(candidate, f"takes at least {bound[limit]:.2f} of the {limit}, by its steps alone"))
    return hopeful, pruned


def least_used(candidate: Candidate, machine: Machine, trace: Trace, slo: Slo) -> dict[Limit, float]:
    """By limit, a share of it that is taken whatever else is served: a pause is no shorter than the fastest step that decodes, and
    a first token comes no sooner than the fastest steps that take in its prompt."""
    config, times = candidate.config, machine.times(candidate.config)
    decoding = [times.least("token_generation")] + ([times.least("mixed")] if config.mixed_step else [])
    taking_in = [times.least("chunked_prefill"), *decoding[1:]]
    first = np.array(least_chunk_steps(trace, config)) * min(taking_in)
    later = np.array([request.new_tokens - 1 for request in trace.requests]) * min(decoding)
    pauses = np.array([min(decoding)]) if later.any() else np.array([0.0])
    least = {"ttft": first, "itl": pauses, "e2e": first + later}
    return {limit: float(np.percentile(least[limit.metric], limit.percentile)) / limit.seconds for limit in slo.limits}
