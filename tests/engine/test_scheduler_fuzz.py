# SPDX-License-Identifier: Apache-2.0
"""Random workloads: whatever the scheduler does, each request gets the tokens it would get alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
from helpers import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from optimum_neuron.config import NeuronConfig
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.engine.request import Request
from optimum_neuron.engine.scheduler import Scheduler
from optimum_neuron.engine.step import ScheduledChunk, Step
from optimum_neuron.graphs.family import GraphFamily, rows_needed
from optimum_neuron.graphs.spec import graph_specs


VOCAB = 7
END = 3
EMPTY, ATOMIC = 17, 23
SHARED = [random.Random(9).randrange(VOCAB) for _ in range(64)]
PICKS = random.Random(5).choices(range(VOCAB), k=1009)


def row_after(row: int, token: int) -> int:
    """A cache row stands for all tokens up to it, as a key that passed through attention does."""
    return (row * 1_000_003 + token + 1) % (2**61 - 1)


def atomic_rows(prompt: list[int]) -> list[int]:
    """Rows that depend on the whole prompt: none of them is right for another prompt that merely starts alike."""
    whole = ATOMIC
    for token in prompt:
        whole = row_after(whole, token)
    return [row_after(whole, index) for index in range(len(prompt))]


def token_from(row: int) -> int:
    return PICKS[row % len(PICKS)]


def alone(request: Request, max_new_tokens: int) -> list[int]:
    """What a request gets with nobody else around."""
    prompt = request.prompt_token_ids.tolist()
    row = EMPTY
    for token in prompt:
        row = row_after(row, token)
    if request.atomic:
        row = atomic_rows(prompt)[-1]
    tokens = [token_from(row)]
    while len(tokens) < max_new_tokens and tokens[-1] not in request.eos_token_ids:
        row = row_after(row, tokens[-1])
        tokens.append(token_from(row))
    return tokens


def snapshot(value: Any) -> Any:
    """Everything that an object holds, as plain data that can be compared."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, (str, int, float, type(None), Enum, frozenset)):
        return value
    if is_dataclass(value):
        return [snapshot(getattr(value, item.name)) for item in fields(value)]
    if isinstance(value, dict):
        return [(key, snapshot(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)) or not hasattr(value, "__dict__"):
        return [snapshot(item) for item in value]
    return snapshot(vars(value))


@dataclass
class Harness:
    """Runs a scheduler with a model made of sums, and checks every step."""

    scheduler: Scheduler
    config: NeuronConfig
    options: SchedulerOptions
    check_purity: bool = True
    deterministic: bool = False
    calls: int = 0
    requests: dict[str, Request] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    streaks: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = [[-1] * self.config.sequence_length for _ in range(self.config.batch_size)]

    def add(self, request: Request) -> bool:
        try:
            self.scheduler.add(request)
        except ValueError:
            return False
        name = request.request_id
        self.requests[name], self.outputs[name] = request, []
        self.limits[name] = self.scheduler.state(name).max_new_tokens
        return True

    def abort(self, name: str) -> None:
        live = name not in self.finished and name not in self.aborted
        assert self.scheduler.abort(name) == live
        if live:
            self.aborted.add(name)

    def schedule(self) -> Step | None:
        self.calls += 1
        if not self.check_purity or self.calls % 3:  # a snapshot costs more than the step
            return self.scheduler.schedule()
        before = snapshot(self.scheduler)
        step = self.scheduler.schedule()
        assert step == self.scheduler.schedule()
        assert snapshot(self.scheduler) == before
        return step

    def run(self, step: Step) -> tuple[list[int], list[int]]:
        """The model: copies, then writes, then reads; the copies in the order of the chunks."""
        for chunk in step.chunks:
            if chunk.reuse:
                source, length = chunk.reuse
                self.cache[chunk.slot][:length] = self.cache[source][:length]
        decode_tokens = []
        for decode in step.decodes:
            rows, output = self.cache[decode.slot], self.outputs[decode.request_id]
            end = len(self.requests[decode.request_id].prompt_token_ids) + len(output) - 1
            rows[end] = row_after(rows[end - 1], output[-1])
            decode_tokens.append(token_from(rows[end]))
        return decode_tokens, [token_from(self.run_chunk(chunk)) for chunk in step.chunks]

    def run_chunk(self, chunk: ScheduledChunk) -> int:
        rows, request = self.cache[chunk.slot], self.requests[chunk.request_id]
        prompt, end = request.prompt_token_ids.tolist(), chunk.start + chunk.count
        if request.atomic:
            rows[: len(prompt)] = atomic_rows(prompt)
        else:
            for index in range(chunk.start, end):
                rows[index] = row_after(rows[index - 1] if index else EMPTY, prompt[index])
        return rows[end - 1]

    def commit(self, step: Step, tokens: tuple[list[int], list[int]], seconds: float) -> None:
        for event in self.scheduler.commit(step, *tokens, seconds=seconds):
            name = event.request_id
            assert name not in self.finished and name not in self.aborted
            self.outputs[name].append(event.token_id)
            if event.finish_reason:
                self.finished[name] = event.finish_reason
        self.scheduler.slots.check()

    def check_step(self, step: Step) -> None:
        scheduler, config, options = self.scheduler, self.config, self.options
        states = list(scheduler._live.values())
        running = {state.request.request_id for state in states if state.slot is not None and not state.remaining}
        decoding = self.decoding(step)
        assert set(decoding) in (running, set()) and (decoding or step.chunks)
        assert len(decoding) == len(set(decoding))
        if scheduler.policy == "mixed":
            assert set(decoding) == running
        elif scheduler.policy == "all_chunks":
            assert len(step.chunks) <= 1
        tokens = len(step.decodes) + sum(chunk.count for chunk in step.chunks)
        assert tokens <= (options.max_step_tokens or tokens)
        self.check_graph(step)
        if step.chunks:
            self.check_bypass(step)
        held = [state.slot for state in states if state.slot is not None]
        held += [chunk.slot for chunk in step.chunks if chunk.is_first]
        assert len(held) == len(set(held)) <= config.batch_size
        for chunk in step.chunks:
            assert chunk.slot not in {decode.slot for decode in step.decodes}
            self.check_chunk(chunk)

    def check_graph(self, step: Step) -> None:
        """The smallest of its kind that holds the step, or the largest mixed one."""
        counts, rows = [chunk.count for chunk in step.chunks], self.config.ctx_batch_size
        ends = [chunk.start + chunk.count for chunk in step.chunks]
        ends += [len(self.requests[name].prompt_token_ids) + len(self.outputs[name]) for name in self.decoding(step)]
        kind = "token_generation" if not counts else "mixed" if step.decodes else "chunked_prefill"
        fitting = [
            graph
            for graph in sorted(graph_specs(self.config), key=lambda graph: (graph.chunk_size, graph.context_length))
            if graph.kind == ("mixed" if self.deterministic else kind)
            and graph.context_length >= max(ends)
            and (not counts or rows_needed(counts, graph.chunk_size) <= rows)
        ]
        assert step.graph == fitting[-1 if self.deterministic else 0]
        assert len({chunk.request_id for chunk in step.chunks}) == len(step.chunks)

    @staticmethod
    def decoding(step: Step) -> list[str]:
        return [decode.request_id for decode in step.decodes]

    def check_chunk(self, chunk: ScheduledChunk) -> None:
        state, options = self.scheduler.state(chunk.request_id), self.options
        total, end = len(state.request.prompt_token_ids), chunk.start + chunk.count
        assert chunk.is_first == (state.slot is None)
        assert chunk.start == (chunk.reuse.length if chunk.reuse else state.computed)
        assert chunk.reuse is None or (chunk.is_first and options.prefix_reuse and chunk.start < total)
        assert chunk.count >= 1 and chunk.is_last == (end == total)
        if state.request.atomic:
            assert (chunk.start, end) == (0, total)
        else:
            assert chunk.count <= (options.long_prefill_token_threshold or total)
        if not chunk.is_last:
            unit = options.chunk_alignment
            assert end % unit == 0 or end // unit * unit <= chunk.start

    def check_bypass(self, step: Step) -> None:
        """The prompt that is due is passed over only by ones that end, and not too often."""
        states = [state for state in self.scheduler._live.values() if state.slot is None or state.remaining]
        if not self.scheduler.slots.free_count:
            states = [state for state in states if state.slot is not None]
        due = min(states, key=lambda state: (state.request.priority, state.slot is None, state.arrival))
        name = due.request.request_id
        if name in {chunk.request_id for chunk in step.chunks}:
            self.streaks[name] = 0
        elif self.scheduler.policy != "all_chunks":
            assert all(chunk.is_last for chunk in step.chunks)
            others = [self.scheduler.state(chunk.request_id).request for chunk in step.chunks]
            assert all(other.priority == due.request.priority for other in others)
            self.streaks[name] = self.streaks.get(name, 0) + 1
            assert self.streaks[name] <= self.options.max_bypass

    def check_end(self) -> None:
        assert self.scheduler.slots.free_count == self.config.batch_size and not self.scheduler.has_work
        assert set(self.finished) | self.aborted == set(self.requests) and not set(self.finished) & self.aborted
        for name, request in self.requests.items():
            expected = alone(request, self.limits[name])
            if name in self.aborted:
                expected = expected[: len(self.outputs[name])]
            else:
                assert self.finished[name] == ("stop" if expected[-1] in request.eos_token_ids else "length")
            assert self.outputs[name] == expected, f"request {name}"


@dataclass(frozen=True)
class Workload:
    """Requests with the step at which each arrives and, for some, the step at which it is aborted, and whether that
    happens while the step runs."""

    config: NeuronConfig
    options: SchedulerOptions
    arrivals: list[tuple[int, Request]]
    aborts: list[tuple[int, str, bool]]
    seed: int
    deterministic: bool = False


def play(workload: Workload, check_purity: bool = True) -> Harness:
    family = GraphFamily(graph_specs(workload.config), deterministic=workload.deterministic)
    scheduler = Scheduler(workload.config, workload.options, family, min_reuse=2)
    harness = Harness(scheduler, workload.config, workload.options, check_purity, workload.deterministic)
    work = sum(len(request.prompt_token_ids) + workload.config.sequence_length for _, request in workload.arrivals)
    clock = random.Random(workload.seed)
    last = max([at for at, _ in workload.arrivals] + [at for at, _, _ in workload.aborts])
    number = 0
    while number <= last or scheduler.has_work:
        assert number <= last + work, "no progress"
        for _, request in (item for item in workload.arrivals if item[0] == number):
            harness.add(request)
        due = [item for item in workload.aborts if item[0] == number and item[1] in harness.requests]
        for _, name, _ in (item for item in due if not item[2]):
            harness.abort(name)
        step = harness.schedule()
        assert (step is None) == (not scheduler.has_work)
        if step is not None:
            harness.check_step(step)
            tokens = harness.run(step)
            for _, name, _ in (item for item in due if item[2]):
                harness.abort(name)
            harness.commit(step, tokens, clock.uniform(0.001, 0.02))
        number += 1
    harness.check_end()
    return harness


@st.composite
def configs(draw: st.DrawFn) -> NeuronConfig:
    slots = draw(st.integers(1, 6))
    rows = draw(st.integers(1, min(slots, 3)))
    sizes = sorted(draw(st.sets(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3)))
    length = slots + rows * sizes[-1] + draw(st.integers(8, 60))
    return NeuronConfig(
        batch_size=slots,
        sequence_length=length,
        prefill_chunk_size=sizes[-1],
        prefill_chunk_buckets=tuple(sizes[:-1]),
        ctx_batch_size=rows,
        context_buckets=tuple(sorted({length, *draw(st.lists(st.integers(1, length), max_size=2))})),
        mixed_step=draw(st.booleans()) if slots > 1 else False,
    )


@st.composite
def option_sets(draw: st.DrawFn, config: NeuronConfig) -> SchedulerOptions:
    policies = ["auto", "alternate", "prefill_first", "all_chunks", *(["mixed"] * 3 if config.mixed_step else [])]
    policy = draw(st.sampled_from(policies))
    return SchedulerOptions(
        policy=policy,
        max_step_tokens=draw(st.none() | st.integers(config.batch_size + 1, config.batch_size + 40)),
        long_prefill_token_threshold=draw(st.just(0) | st.integers(1, 12)),
        itl_target_ms=draw(st.none() | st.floats(1, 30)) if policy in ("auto", "mixed", "alternate") else None,
        max_bypass=draw(st.integers(0, 3)),
        chunk_alignment=draw(st.sampled_from([1, 1, 2, 4, 8])),
        prefix_reuse=draw(st.sampled_from([True, True, True, False])),
        reuse_generated=draw(st.booleans()),
    )


@st.composite
def requests(draw: st.DrawFn, name: str, length: int) -> Request:
    shared = draw(st.integers(0, 3) | st.integers(0, length))
    tail = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4))
    return Request(
        request_id=name,
        prompt_token_ids=[*SHARED[:shared], *tail],
        max_new_tokens=draw(st.sampled_from([None, 1, 2, 3, 4, 5, 6, 7, 8])),
        eos_token_ids=draw(st.sampled_from([frozenset(), frozenset({END})])),
        priority=draw(st.sampled_from([0, 0, 0, 1])),
        atomic=draw(st.sampled_from([False] * 7 + [True])),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    config = draw(configs())
    names = [f"r{index}" for index in range(draw(st.integers(1, 14)))]
    arrivals = [(draw(st.integers(0, 12)), draw(requests(name, config.sequence_length))) for name in names]
    aborts = []
    for at, request in draw(st.lists(st.sampled_from(arrivals), max_size=4)):
        aborts.append((at + draw(st.integers(0, 12)), request.request_id, draw(st.booleans())))
    deterministic = config.mixed_step and draw(st.booleans())
    return Workload(config, draw(option_sets(config)), arrivals, aborts, draw(st.integers(0, 99)), deterministic)


@examples(
    400,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(workloads())
def test_each_request_gets_the_tokens_it_would_get_alone(workload: Workload) -> None:
    play(workload)


@pytest.mark.parametrize("policy", ["mixed", "alternate", "prefill_first", "all_chunks"])
def test_of_many_requests_none_is_lost_and_none_is_served_twice(policy: Any) -> None:
    """2500 requests per policy through one scheduler, many more waiting than running."""
    rng = random.Random(policy)
    config = NeuronConfig(
        batch_size=8,
        sequence_length=64,
        prefill_chunk_size=8,
        prefill_chunk_buckets=(4,),
        ctx_batch_size=2,
        mixed_step=policy == "mixed",
    )
    arrivals, aborts = [], []
    for index in range(2500):
        at = index // 10 * 5 if index % 1000 < 800 else index // 100 * 50  # a steady stream, and bursts
        length = rng.randint(20, 50) if rng.random() < 0.2 else rng.randint(1, 6)
        tokens = [*SHARED[: rng.randrange(length)], *rng.choices(range(VOCAB), k=3)]
        request = Request(
            request_id=f"r{index}",
            prompt_token_ids=tokens,
            max_new_tokens=rng.randint(1, 5),
            priority=int(rng.random() < 0.1),
            atomic=len(tokens) <= 15 and rng.random() < 0.1,
        )
        arrivals.append((at, request))
        if rng.random() < 0.05:
            aborts.append((at + rng.randrange(8), request.request_id, rng.random() < 0.5))
    options = SchedulerOptions(policy=policy, max_step_tokens=22, long_prefill_token_threshold=12, max_bypass=2)
    harness = play(Workload(config, options, arrivals, aborts, 0), check_purity=False)
    assert len(harness.requests) == 2500
    assert not harness.scheduler._live and not harness.scheduler._waiting
