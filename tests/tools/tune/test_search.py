# SPDX-License-Identifier: Apache-2.0
"""The search: it finds what is best where that is known, leaves nothing out that might be, and its steps are an engine's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from helpers import VOCAB, Opener

from optimum_neuron.config import NeuronConfig
from optimum_neuron.core import Step
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.engine.scheduler import Scheduler
from optimum_neuron.step.spec import GraphSpec, graph_specs
from optimum_neuron.tools.tune.candidates import Candidate, SizeGrid, export_words, serve_words
from optimum_neuron.tools.tune.search import Machine, search_sizes
from optimum_neuron.tools.tune.simulate import ChunkCurves, CpuClock, Curve, StepClock, simulate
from optimum_neuron.tools.tune.slo import Slo
from optimum_neuron.tools.tune.trace import RequestTrace, SharedPart, TracedRequest, traced_request


FIXED = {"sequence_length": 256, "target": "trn2"}
TRACE = RequestTrace.from_requests(
    [TracedRequest(0.3 * number, 40 + 30 * (number % 5), 12) for number in range(20)], "made"
)


@dataclass
class Made(Machine):
    """A machine whose graphs take what a formula says."""

    seconds: Callable[[GraphSpec], float]
    room: int = 10**9  # bytes; a config needs a byte for each token of its cache
    minutes: Callable[[NeuronConfig], float] = lambda config: 1.0
    is_measured: bool = False
    about: Sequence[str] = ()
    reuses_prefixes: bool = True

    def memory(self, config: NeuronConfig) -> tuple[int, int]:
        return config.batch_size * config.sequence_length, self.room

    def compile_minutes(self, config: NeuronConfig) -> float:
        return self.minutes(config)

    def step_clock(self, config: NeuronConfig) -> StepClock:
        return StepClock(graph_specs(config), self.seconds)


def grid() -> list[Candidate]:
    return SizeGrid((2, 4), (32, 128), (1,), ("none",), ("mixed", "alternate")).make_candidates(FIXED)[0]


def best(machine: Machine, slo: str) -> Candidate:
    return search_sizes(grid(), machine, TRACE, Slo.parse_limits(slo)).best.candidate


def by_tokens(second: float, token: float) -> Callable[[GraphSpec], float]:
    return lambda graph: second + token * graph.tokens


def test_small_chunks_limit_pauses_large_ones_first_tokens_and_among_equals_the_cheapest_export_wins() -> None:
    assert best(Made(by_tokens(0.01, 0.0005)), "itl=40ms").config.prefill_chunk_size == 32
    assert best(Made(by_tokens(0.05, 0.0001)), "ttft.p50=180ms,itl=90ms").config.prefill_chunk_size == 128
    prices: dict[str, Callable[[int], float]] = {"alternate": lambda count: count, "mixed": lambda count: 9 - count}
    for policy, price in prices.items():
        minutes = partial(lambda price, config: price(len(graph_specs(config))), price)
        assert best(Made(lambda graph: 0.01, minutes=minutes), "ttft=10s").policy == policy


def test_a_contexts_graph_is_chosen_by_what_it_costs() -> None:
    machine = Made(lambda graph: 0.001 + graph.context_length * 1e-4, minutes=lambda config: len(graph_specs(config)))
    trace = RequestTrace.from_requests([TracedRequest(float(number), 300, 20) for number in range(6)], "made")
    contexts = SizeGrid((2,), (64,), (1,), ("none", "halves"), ("mixed",))
    found = search_sizes(
        contexts.make_candidates({**FIXED, "sequence_length": 1024})[0], machine, trace, Slo.parse_limits("itl=90ms")
    )
    assert found.best.meets and not any(result.meets for result in found.results[1:])
    assert found.best.candidate.config.context_buckets == (256, 512, 1024)


def test_memory_and_the_budget_are_kept() -> None:
    machine = Made(by_tokens(0.01, 0), room=2 * 256, minutes=lambda config: 10 * len(graph_specs(config)))
    found = search_sizes(grid(), machine, TRACE, Slo(()), compile_budget=20)
    assert {(each.candidate.config.batch_size, each.candidate.policy) for each in found.results} == {(2, "alternate")}
    assert sorted(each.why.split()[0] for each in found.pruned) == ["needs"] * 4 + ["takes"] * 2
    slow = Made(by_tokens(0.01, 0), minutes=lambda config: 30)
    with pytest.raises(ValueError, match=r"none of 8 candidates can be exported: .* takes 30\.0 of 5 minutes"):
        search_sizes(grid(), slow, TRACE, Slo(()), compile_budget=5)


def test_the_nearest_is_told_where_nothing_meets_the_limits_and_two_searches_agree() -> None:
    told: list[str] = []
    slo, machine = Slo.parse_limits("ttft=20ms,itl=1ms"), Made(by_tokens(0.01, 0.001))
    found = search_sizes(grid(), machine, TRACE, slo, advance=told.append)
    assert len(told) == len(grid()) and found == search_sizes(grid(), machine, TRACE, slo)
    assert found.results and not found.best.meets and found.best.worst == min(each.worst for each in found.results)
    assert len(found.results) == len(grid()) and not found.pruned


@pytest.mark.parametrize("policy", ["mixed", "alternate"])
def test_the_simulation_takes_the_steps_that_an_engine_takes(open_runner: Opener, policy: str) -> None:
    """Arrivals are counted in steps: a step takes a second, and requests come at the same ones."""
    runner = open_runner("llama", "cpu")
    arrivals = (0, 0, 0, 1, 4, 4, 9, 30, 30)
    shared = (SharedPart("a", 20),)
    sent = [
        TracedRequest(float(step), 21 + 5 * (number % 3), 1 + 3 * (number % 4), shared if number % 2 else ())
        for number, step in enumerate(arrivals)
    ]
    trace = RequestTrace.from_requests(sent, "made")
    prompts = trace.draw_prompts(VOCAB)
    options = SchedulerOptions(policy=policy)  # type: ignore[arg-type]
    simulated: list[Step] = []
    scheduler = Scheduler(runner.config, options, runner.family)

    def a_second(step: Step, scheduler: Scheduler) -> float:
        simulated.append(step)
        return 1.0

    outcome = simulate(scheduler, a_second, trace, prompts)
    answered = [len(outcome.answers[str(number)].times) for number in range(len(sent))]
    assert answered == [each.new_tokens for each in sent]
    assert any(chunk.prefix for step in simulated for chunk in step.pieces)
    engine, taken, clock, come = Engine(runner, options, vocab_size=VOCAB), list[Step](), 0, 0
    while come < len(prompts) or engine.has_work:
        while come < len(prompts) and arrivals[come] <= clock:
            engine.add_request(traced_request(trace, prompts, come))
            come += 1
        step = engine.scheduler.schedule()
        if step is None:
            clock = arrivals[come]
            continue
        taken.append(step)
        engine.step()
        clock += 1
    assert taken == simulated


LIVE = CpuClock(
    decode=Curve((1, 4), (10.0, 16.0)),
    decode_column=Curve((1, 4), (0.1, 0.1)),
    chunks={
        8: ChunkCurves(
            alone=Curve((1, 8), (10.0, 24.0)), mixed=Curve((1, 8), (20.0, 34.0)), unread=Curve((8,), (2.0,)), column=Curve((8,), (0.5,))
        )
    },
    host=Curve((1,), (1.0,)),
    copied_token=0.25,
)  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        # The shorter prompt goes first: up to its fifth token. Then it decodes at a context of 6, beside 8 tokens of the other, of which
        # 4 are left, behind 8; that one decodes in the second slot.
        ([(12, 3), (5, 2)], [1 + 18.0, 1 + 34 + 0.1 * 6, 1 + 16 + 0.5 * 4 * 8, 1 + 12 + 0.1 * 13, 1 + 12 + 0.1 * 14]),
        # Nobody reads anything of a chunk that does not end its prompt.
        ([(9, 1)], [1 + 24.0 - 2, 1 + 10 + 0.5 * 8]),
    ],
)
def test_on_a_cpu_a_step_costs_what_its_tokens_see(sent: list[tuple[int, int]], expected: list[float]) -> None:
    config = NeuronConfig(batch_size=4, sequence_length=64, prefill_chunk_size=8, target="cpu")
    trace = RequestTrace.from_requests([TracedRequest(0.0, prompt, new) for prompt, new in sent], "made")
    took: list[float] = []

    def seconds(step: Step, scheduler: Scheduler) -> float:
        took.append(LIVE.time_step(step, scheduler))
        return took[-1]

    simulate(Scheduler(config), seconds, trace, trace.draw_prompts())
    assert took == pytest.approx(expected)


AXES = {
    "rows=4": "'rows=4' is no axis that is given once; give axes as batch=4,8 out of batch, chunk, ctx, buckets, policy",
    "batch=4 batch=8": "'batch=8' is no axis that is given once",
    "batch=0": "has '0'; give whole numbers of at least 1",
    "policy=4": "has '4'; give one of mixed, alternate",
    "buckets=thirds": "give one of none, quarters, halves or lengths as 512+2048",
}  # fmt: skip


def test_wrong_axes_are_refused() -> None:
    for words, told in AXES.items():
        with pytest.raises(ValueError) as raised:
            SizeGrid.for_target("cpu").replace_axes(words.split())
        assert told in str(raised.value)


def test_impossible_combinations_are_left_out_and_told_where_none_is_left() -> None:
    grid = SizeGrid.for_target("trn2")
    found, refused = grid.replace_axes(["chunk=64,512", "ctx=1", "batch=4"]).make_candidates(FIXED)
    assert {each.config.prefill_chunk_size for each in found} == {64} and "prefill_chunk_size=512" in refused[0]
    with pytest.raises(ValueError, match="prefill_chunk_size=512 is larger than sequence_length=256"):
        grid.replace_axes(["chunk=512"]).make_candidates(FIXED)


def test_commands_hold_what_is_not_usual() -> None:
    config = NeuronConfig(batch_size=4, sequence_length=1024, target="trn2", tensor_parallel_size=8)
    told = export_words("a model", config, "out/", ("--revision", "v1"))
    assert told.startswith("optimum-cli export neuron --model 'a model' --revision v1 --")
    assert " --tensor-parallel-size 8 " in told and told.endswith(" out/")
    assert serve_words("out/", 128) == "optimum-cli neuron serve out/ --backend engine"
    assert serve_words("out/", 129).endswith(" --max-queue 129")


def test_steps_that_follow_a_pause_or_a_chunk_take_longer() -> None:
    config = NeuronConfig(batch_size=4, sequence_length=64, prefill_chunk_size=8, target="cpu")
    trace = RequestTrace.from_requests([TracedRequest(0.0, 8, 3)], "made")
    plain = LIVE.draw_times()
    woken = CpuClock(**{**vars(LIVE), "woken": 100.0, "turned": 1000.0}).draw_times()
    slower = CpuClock(**{**vars(LIVE), "ratios": (2.0,)}).draw_times()
    found = []
    for seconds in (plain, woken, slower):
        scheduler = Scheduler(config, SchedulerOptions(prefix_reuse=False))
        found.append(simulate(scheduler, seconds, trace, trace.draw_prompts()).seconds)
    assert found[1] == pytest.approx(found[0] + 1100) and found[2] == pytest.approx(2 * found[0])
