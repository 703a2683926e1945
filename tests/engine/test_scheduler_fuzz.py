# SPDX-License-Identifier: Apache-2.0
"""Random workloads: whatever the scheduler does, each request gets the tokens it would get alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from helpers import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from invariants import check_cache

from optimum_neuron.config import NeuronConfig
from optimum_neuron.core import PromptPiece, Request, Step
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.engine.scheduler import Scheduler
from optimum_neuron.step.family import GraphFamily, rows_needed
from optimum_neuron.step.spec import graph_specs


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


def state_of(tokens: list[int]) -> int:
    """What a row keeps that has taken in these tokens."""
    row = EMPTY
    for token in tokens:
        row = row_after(row, token)
    return row


def alone(request: Request, max_new_tokens: int) -> list[int]:
    """What a request gets with nobody else around."""
    prompt = request.prompt_token_ids.tolist()
    row = atomic_rows(prompt)[-1] if request.atomic else state_of(prompt)
    tokens = [token_from(row)]
    while len(tokens) < max_new_tokens and tokens[-1] not in request.eos_token_ids:
        row = row_after(row, tokens[-1])
        tokens.append(token_from(row))
    return tokens


def frozen(value: Any) -> Any:
    """Everything that an object holds, as plain data that can be compared."""
    if isinstance(value, np.ndarray | memoryview):
        return (value.shape, value.tobytes())
    if isinstance(value, str | int | float | None | frozenset):
        return value
    if is_dataclass(value):
        return [frozen(getattr(value, item.name)) for item in fields(value)]
    if isinstance(value, dict):
        return [(key, frozen(item)) for key, item in value.items()]
    if isinstance(value, list | tuple) or not hasattr(value, "__dict__"):
        return [frozen(item) for item in value]
    return frozen(vars(value))


@dataclass(frozen=True)
class Workload:
    """Requests by the step at which each arrives; aborts by step, with whether they happen while it runs.

    `snapshots` are places for state of rows; None: a token follows from the row before it alone.
    """

    config: NeuronConfig
    options: SchedulerOptions
    arrivals: list[tuple[int, Request]]
    aborts: list[tuple[int, str, bool]]
    seed: int = 0
    deterministic: bool = False
    snapshots: int | None = None


class Harness:
    """Runs a scheduler with a model made of sums, and checks every step."""

    def __init__(self, workload: Workload, *, check_purity: bool) -> None:
        self.config, self.options, self.snapshots = workload.config, workload.options, workload.snapshots
        self.deterministic, self.check_purity = workload.deterministic, check_purity
        family = GraphFamily(graph_specs(self.config), deterministic=self.deterministic)
        self.scheduler = Scheduler(self.config, self.options, family, min_reuse=2, state_places=self.snapshots)
        self.table = getattr(self.scheduler.cache.pool, "snapshots", None)
        self.requests: dict[str, Request] = {}
        self.limits: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.streaks: dict[str, int] = {}
        self.slot_of: dict[str, int] = {}
        self.starts: dict[str, int] = {}
        self.preempted: Counter[str] = Counter()
        self.calls = self.steps = self.hits = 0
        self.last_start = -(10**9)
        self.size = self.config.block_length
        self.cache = [[-1] * self.size for _ in range(self.config.kv_blocks)]
        self.has_blocks = self.config.kv_block_size is not None
        self.tables: list[list[int]] = [[] for _ in range(self.config.batch_size)]
        self.state = [-1] * self.config.batch_size
        self.kept = [(-1, 0)] * (self.snapshots or 0)

    def read(self, slot: int, index: int) -> int:
        return self.cache[self.tables[slot][index // self.size]][index % self.size]

    def write(self, slot: int, index: int, row: int) -> None:
        block = self.tables[slot][index // self.size]
        assert sum(block in table for table in self.tables) == 1, f"block {block} is written to, and has several rows"
        self.cache[block][index % self.size] = row
        self.state[slot] = row

    def before(self, slot: int, index: int) -> int:
        """What the token at a place follows: the row before it, and, where rows keep state, that."""
        row = self.read(slot, index - 1)
        if self.snapshots is None:
            return row
        assert self.state[slot] == row
        return self.state[slot]

    def tokens(self, name: str) -> list[int]:
        """All that the next token of a request follows."""
        return self.requests[name].prompt_token_ids.tolist() + self.outputs[name]

    def add(self, request: Request) -> bool:
        try:
            self.scheduler.add_request(request)
        except ValueError:
            return False
        name = request.request_id
        self.requests[name], self.outputs[name] = request, []
        self.limits[name] = self.scheduler.queues.live[name].max_new_tokens
        return True

    def abort(self, name: str) -> None:
        live = name not in self.finished and name not in self.aborted
        assert self.scheduler.abort_request(name) == live
        if live:
            self.aborted.add(name)
            self.end(name)

    def end(self, name: str) -> None:
        slot = self.slot_of.pop(name, None)
        if slot is not None:
            self.tables[slot] = []

    def schedule(self) -> Step | None:
        self.calls += 1
        if not self.check_purity or self.calls % 3:  # to freeze it costs more than the step
            return self.scheduler.schedule()
        before = frozen(self.scheduler)
        step = self.scheduler.schedule()
        assert step == self.scheduler.schedule()
        assert frozen(self.scheduler) == before
        return step

    def change_blocks(self, step: Step) -> None:
        """Who is preempted loses everything, then blocks are assigned, then copies made."""
        for gone in step.preempted:
            self.end(gone.request_id)
            self.preempted[gone.request_id] += 1
        for assignment in step.assignments:
            held = {block for table in self.tables for block in table}
            shared, fresh = assignment.blocks[: assignment.shared], assignment.blocks[assignment.shared :]
            assert not held & set(fresh) and len(set(fresh)) == len(fresh), "a block that is written to has one owner"
            assert assignment.first == len(self.tables[assignment.slot])
            assert self.has_blocks or assignment.blocks == (assignment.slot,)
            self.tables[assignment.slot] += [*shared, *fresh]
        for copy in step.copies:
            self.cache[copy.destination][: copy.length] = self.cache[copy.source][: copy.length]

    def run(self, step: Step) -> tuple[list[int], list[int]]:
        """The model: copies, then writes, then reads; the copies in the order of the chunks."""
        self.steps += 1
        self.change_blocks(step)
        for chunk in step.pieces:
            if chunk.is_first:
                self.slot_of[chunk.request_id] = chunk.slot
                self.starts.setdefault(chunk.request_id, self.steps)
                self.last_start = self.steps
            if chunk.prefix:
                self.hits += 1
            if chunk.prefix and chunk.prefix.state is not None:
                self.state[chunk.slot], length = self.kept[chunk.prefix.state]
                assert length == chunk.prefix.length
        tokens = self.advance(step)
        for kept in step.kept:
            self.kept[kept.place] = self.state[kept.slot], kept.length
        return tokens

    def advance(self, step: Step) -> tuple[list[int], list[int]]:
        decode_tokens = []
        for decode in step.decodes:
            end = len(self.tokens(decode.request_id)) - 1
            row = row_after(self.before(decode.slot, end), self.outputs[decode.request_id][-1])
            self.write(decode.slot, end, row)
            decode_tokens.append(token_from(row))
        return decode_tokens, [token_from(self.run_chunk(chunk)) for chunk in step.pieces]

    def run_chunk(self, chunk: PromptPiece) -> int:
        request, tokens = self.requests[chunk.request_id], self.tokens(chunk.request_id)
        for index in range(chunk.start, chunk.start + chunk.count):
            if request.atomic and index < len(request.prompt_token_ids):
                row = atomic_rows(request.prompt_token_ids.tolist())[index]
            else:
                row = row_after(self.before(chunk.slot, index) if index else EMPTY, tokens[index])
            self.write(chunk.slot, index, row)
        return row

    def commit(self, step: Step, tokens: tuple[list[int], list[int]], seconds: float) -> None:
        for event in self.scheduler.commit(step, *tokens, seconds=seconds):
            name = event.request_id
            assert name not in self.finished and name not in self.aborted
            self.outputs[name].append(event.token_id)
            if event.finish_reason:
                self.finished[name] = event.finish_reason
                self.end(name)
        check_cache(self.scheduler.cache)
        for place, text in enumerate(self.texts()):
            assert text is None or self.kept[place] == (state_of(text), len(text)), (
                f"snapshot {place} is of other tokens"
            )

    def texts(self) -> list[list[int] | None]:
        """The tokens of each snapshot."""
        return [] if self.table is None else [each if each is None else each.tolist() for each in self.table._tokens]

    def check_step(self, step: Step) -> None:
        scheduler, config, options = self.scheduler, self.config, self.options
        gone = {each.request_id for each in step.preempted}
        states = [state for state in scheduler.queues.live.values() if state.request.request_id not in gone]
        running = {state.request.request_id for state in states if state.slot is not None and not state.remaining}
        decoding = self.decoding(step)
        assert set(decoding) in (running, set()) and (decoding or step.pieces)
        assert len(decoding) == len(set(decoding))
        if scheduler.policy == "mixed":
            assert set(decoding) == running
        elif scheduler.policy == "all_chunks":
            assert len(step.pieces) <= 1
        tokens = len(step.decodes) + sum(chunk.count for chunk in step.pieces)
        assert tokens <= (options.max_step_tokens or tokens)
        self.check_graph(step)
        if step.pieces:
            self.check_bypass(step)
        held = [state.slot for state in states if state.slot is not None]
        held += [chunk.slot for chunk in step.pieces if chunk.is_first]
        assert len(held) == len(set(held)) <= config.batch_size
        for chunk in step.pieces:
            assert chunk.slot not in {decode.slot for decode in step.decodes}
            self.check_chunk(chunk)
        self.check_blocks(step)
        self.check_snapshots(step)

    def check_snapshots(self, step: Step) -> None:
        """Who takes over a prefix has a snapshot of it, which is not written to meanwhile; what is kept is where a chunk ends, and
        where it reaches a multiple of the interval something is, while there are places."""
        needed = {chunk.prefix.state for chunk in step.pieces if chunk.prefix}
        assert self.snapshots is None or None not in needed
        places = [kept.place for kept in step.kept]
        assert len(set(places)) == len(places) and set(places) <= set(range(self.snapshots or 0)) - needed
        ends = {chunk.request_id: chunk.start + chunk.count for chunk in step.pieces}
        for kept in step.kept:
            assert kept.length == ends[kept.request_id] and not self.requests[kept.request_id].atomic
        for chunk in step.pieces:
            assert not chunk.start < chunk.cut < chunk.start + chunk.count
        interval = self.config.state_snapshot_interval
        if self.table is None or interval is None or len(places) + len(needed) == self.snapshots:
            return
        have = [*(self.tokens(kept.request_id)[: kept.length] for kept in step.kept), *self.texts()]
        for chunk in step.pieces:
            end = ends[chunk.request_id]
            due = end // interval > chunk.start // interval and end >= 2 and not self.requests[chunk.request_id].atomic
            assert not due or self.tokens(chunk.request_id)[:end] in have

    def check_blocks(self, step: Step) -> None:
        """The last by priority and arrival are preempted, no more than it takes, and not soon after a start; rows get what they write to."""
        holders = [state for state in self.scheduler.queues.live.values() if state.slot is not None]
        holders.sort(key=lambda state: (state.request.priority, state.arrival))
        kept = len(holders) - len(step.preempted)
        assert [state.arrival for state in holders[kept:]] == [gone.arrival for gone in step.preempted][::-1]
        if step.preempted:
            assert self.has_blocks and kept and not any(chunk.is_first for chunk in step.pieces)
            assert self.steps + 1 - self.last_start >= self.size
            stay = holders[: kept + 1]  # the last one that had to go, too
            used = {block for state in stay for block in self.tables[state.slot]}
            needed = sum(state.cached == len(self.tables[state.slot]) * self.size for state in stay)
            assert needed > self.config.kv_blocks - len(used)
        assigned = {each.slot: each for each in step.assignments}
        assert len(assigned) == len(step.assignments)
        ends = {chunk.slot: chunk.start + chunk.count for chunk in step.pieces}
        ends |= {decode.slot: len(self.tokens(decode.request_id)) for decode in step.decodes}
        assert assigned.keys() <= ends.keys()
        for slot, end in ends.items():
            had = len(self.tables[slot]) if slot not in assigned or assigned[slot].first else 0
            assert had + len(assigned[slot].blocks if slot in assigned else ()) == -(-end // self.size)
        for chunk in step.pieces if self.has_blocks else ():
            start = assigned[chunk.slot].shared * self.size if chunk.is_first else 0
            assert start <= chunk.start and (start == chunk.start or not chunk.is_first or chunk.prefix)

    def check_graph(self, step: Step) -> None:
        """The smallest of its kind that holds the step, or the largest mixed one."""
        counts, rows = [chunk.count for chunk in step.pieces], self.config.ctx_batch_size
        ends = [chunk.start + chunk.count for chunk in step.pieces]
        ends += [len(self.tokens(name)) for name in self.decoding(step)]
        kind = "token_generation" if not counts else "mixed" if step.decodes else "chunked_prefill"
        fitting = [
            graph
            for graph in sorted(graph_specs(self.config), key=lambda graph: (graph.chunk_size, graph.context_length))
            if graph.kind == ("mixed" if self.deterministic else kind)
            and graph.context_length >= max(ends)
            and (not counts or rows_needed(counts, graph.chunk_size) <= rows)
        ]
        assert step.graph == fitting[-1 if self.deterministic else 0]
        assert len({chunk.request_id for chunk in step.pieces}) == len(step.pieces)

    @staticmethod
    def decoding(step: Step) -> list[str]:
        return [decode.request_id for decode in step.decodes]

    def check_chunk(self, chunk: PromptPiece) -> None:
        state, options = self.scheduler.queues.live[chunk.request_id], self.options
        prompt, total = len(state.request.prompt_token_ids), len(self.tokens(chunk.request_id))
        end, again = chunk.start + chunk.count, self.preempted[chunk.request_id]
        assert chunk.recomputed <= (chunk.count if again else 0)
        assert chunk.is_first == (state.slot is None)
        assert chunk.start == (chunk.prefix.length if chunk.prefix else state.computed)
        assert chunk.prefix is None or (chunk.is_first and options.prefix_reuse and chunk.start < total)
        assert chunk.count >= 1 and chunk.is_last == (end == total)
        if state.request.atomic and chunk.is_first:
            assert (chunk.start, end) == (0, prompt)
            return
        assert chunk.count <= (options.long_prefill_token_threshold or total)
        if not chunk.is_last:
            unit = options.chunk_alignment
            assert end % unit == 0 or end // unit * unit <= chunk.start

    def check_bypass(self, step: Step) -> None:
        """The prompt that is due is passed over only by ones that end, or are cut after it has begun, and not too often. Nobody else
        starts before it where it waits for blocks."""
        gone = {each.request_id for each in step.preempted}
        states = [state for state in self.scheduler.queues.live.values() if state.request.request_id not in gone]
        states = [state for state in states if state.slot is None or state.remaining]
        if gone or not len(self.scheduler.cache.free_rows):
            states = [state for state in states if state.slot is not None]
        due = min(states, key=lambda state: (state.request.priority, state.slot is None, state.arrival))
        name, passing = due.request.request_id, step.pieces
        if self.has_blocks and due.slot is None:
            passing = tuple(chunk for chunk in passing if chunk.is_first)
        self.streaks |= {chunk.request_id: 0 for chunk in step.pieces}
        if (
            name not in {chunk.request_id for chunk in step.pieces}
            and self.scheduler.policy != "all_chunks"
            and passing
        ):
            is_cut = [due.slot is not None and chunk.start + chunk.count == chunk.cut for chunk in passing]
            assert all(chunk.is_last or cut for chunk, cut in zip(passing, is_cut, strict=True))
            others = [self.scheduler.queues.live[chunk.request_id].request for chunk in passing]
            assert all(other.priority == due.request.priority for other in others)
            self.streaks[name] = self.streaks.get(name, 0) + 1
            assert self.streaks[name] <= self.options.max_bypass

    def check_end(self) -> None:
        assert len(self.scheduler.cache.free_rows) == self.config.batch_size and not self.scheduler.has_work
        assert self.scheduler.cache.used_blocks == 0
        for name, times in self.preempted.items():
            assert times <= (self.steps - self.starts[name]) // self.size, f"{name} was preempted {times} times"
        assert set(self.finished) | self.aborted == set(self.requests) and not set(self.finished) & self.aborted
        for name, request in self.requests.items():
            expected = alone(request, self.limits[name])
            if name in self.aborted:
                expected = expected[: len(self.outputs[name])]
            else:
                assert self.finished[name] == ("stop" if expected[-1] in request.eos_token_ids else "length")
            assert self.outputs[name] == expected, f"request {name}"


def play(workload: Workload, check_purity: bool = True) -> Harness:
    harness = Harness(workload, check_purity=check_purity)
    scheduler = harness.scheduler
    work = sum(len(request.prompt_token_ids) + workload.config.sequence_length for _, request in workload.arrivals)
    work *= 1 if workload.config.kv_block_size is None else 4  # tokens that were preempted are computed again
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


def with_blocks(config: NeuronConfig, size: int, blocks: int) -> NeuronConfig:
    """A config whose blocks are smaller than kernels take, so that short requests have several."""
    object.__setattr__(config, "kv_block_size", size)
    object.__setattr__(config, "kv_cache_tokens", size * blocks)
    return config


@st.composite
def configs(draw: st.DrawFn, blocks: bool = False) -> NeuronConfig:
    slots = draw(st.integers(1, 6))
    rows = draw(st.integers(1, min(slots, 3)))
    sizes = sorted(draw(st.sets(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3)))
    size = draw(st.sampled_from([2, 4, 8, 16])) if blocks else 1
    length = -(-(slots + rows * sizes[-1] + draw(st.integers(8, 60))) // size) * size
    buckets = draw(st.lists(st.integers(1, length // size), max_size=2))
    config = NeuronConfig(
        batch_size=slots,
        sequence_length=length,
        prefill_chunk_size=sizes[-1],
        prefill_chunk_buckets=tuple(sizes[:-1]),
        ctx_batch_size=rows,
        context_buckets=tuple(sorted({length, *(bucket * size for bucket in buckets)})),
        state_snapshot_interval=draw(st.none() | st.integers(1, 12)),
        mixed_step=draw(st.booleans()) if slots > 1 else False,
    )
    per_row = length // size
    return with_blocks(config, size, per_row + draw(st.integers(0, per_row))) if blocks else config


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
def requests(draw: st.DrawFn, name: str, length: int, many: tuple[int, ...] = ()) -> Request:
    shared = draw(st.integers(0, 3) | st.integers(0, length))
    tail = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4))
    return Request(
        request_id=name,
        prompt_token_ids=[*SHARED[:shared], *tail],
        max_new_tokens=draw(st.sampled_from([None, 1, 2, 3, 4, 5, 6, 7, 8, *many])),
        eos_token_ids=draw(st.sampled_from([frozenset(), frozenset({END})])),
        priority=draw(st.sampled_from([0, 0, 0, 1])),
        atomic=draw(st.sampled_from([False] * 7 + [True])),
    )


@st.composite
def workloads(draw: st.DrawFn, blocks: bool = False) -> Workload:
    config = draw(configs(blocks))
    many = (15, 30, 30) if blocks else ()
    names = [f"r{index}" for index in range(draw(st.integers(1, 14)))]
    arrivals = [(draw(st.integers(0, 12)), draw(requests(name, config.sequence_length, many))) for name in names]
    aborts = []
    for at, request in draw(st.lists(st.sampled_from(arrivals), max_size=4)):
        aborts.append((at + draw(st.integers(0, 12)), request.request_id, draw(st.booleans())))
    deterministic = config.mixed_step and draw(st.booleans())
    options, seed, snapshots = draw(option_sets(config)), draw(st.integers(0, 99)), draw(st.none() | st.integers(0, 5))
    return Workload(config, options, arrivals, aborts, seed, deterministic, snapshots)


@pytest.mark.parametrize("blocks", [False, True], ids=["slots", "blocks that run out"])
def test_each_request_gets_the_tokens_it_would_get_alone(blocks: bool) -> None:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

    @examples(400, suppress_health_check=slow)
    @given(workloads(blocks))
    def check(workload: Workload) -> None:
        play(workload)

    check()


def crowd(policy: Any, count: int, config: NeuronConfig, new: int, snapshots: int | None = None) -> Workload:
    """Many requests, of which a steady stream and bursts arrive, most of them short."""
    rng = random.Random(policy)
    arrivals, aborts = [], []
    for index in range(count):
        at = index // 10 * 5 if index % 1000 < 800 else index // 100 * 50
        length = rng.randint(20, 50) if rng.random() < 0.2 else rng.randint(1, 6)
        tokens = [*SHARED[: rng.randrange(length)], *rng.choices(range(VOCAB), k=3)]
        request = Request(
            request_id=f"r{index}",
            prompt_token_ids=tokens,
            max_new_tokens=rng.randint(1, min(new, config.sequence_length - len(tokens) + 1)),
            priority=int(rng.random() < 0.1),
            atomic=len(tokens) <= 23 - config.batch_size and rng.random() < 0.1,
        )
        arrivals.append((at, request))
        if rng.random() < 0.05:
            aborts.append((at + rng.randrange(8), request.request_id, rng.random() < 0.5))
    options = SchedulerOptions(policy=policy, max_step_tokens=22, long_prefill_token_threshold=12, max_bypass=2)
    return Workload(config, options, arrivals, aborts, snapshots=snapshots)


MANY = pytest.mark.parametrize("count", [300, pytest.param(2500, marks=pytest.mark.full)])
POLICIES = pytest.mark.parametrize("policy", ["mixed", "alternate", "prefill_first", "all_chunks"])


@MANY
@POLICIES
@pytest.mark.parametrize("blocks", [False, True], ids=["slots", "blocks"])
def test_of_many_requests_none_is_lost_and_none_is_served_twice(policy: Any, count: int, blocks: bool) -> None:
    """Many more wait in one scheduler than run. With blocks, 12 rows share what 3 of the longest requests take.

    Where steps are mixed, requests continue after the few snapshots alone.
    """
    config = crowd_config(policy == "mixed", slots=12 if blocks else 8)
    config = with_blocks(config, size=4, blocks=48) if blocks else config
    snapshots = 4 if policy == "mixed" else None
    harness = play(crowd(policy, count, config, new=40 if blocks else 5, snapshots=snapshots), check_purity=False)
    assert len(harness.requests) == count and not harness.scheduler.queues.live
    assert harness.hits > count // 10
    assert not blocks or sum(harness.preempted.values()) > count // 30


def crowd_config(mixed: bool = True, slots: int = 8) -> NeuronConfig:
    sizes: dict[str, Any] = {"batch_size": slots, "sequence_length": 64, "prefill_chunk_size": 8, "ctx_batch_size": 2}
    return NeuronConfig(**sizes, prefill_chunk_buckets=(4,), mixed_step=mixed)
