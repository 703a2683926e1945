# SPDX-License-Identifier: Apache-2.0
"""What the scheduler puts into a step, case by case. tests/test_scheduler_fuzz.py proves it for random workloads."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from optimum_neuron.config import NeuronConfig
from optimum_neuron.engine.policy import SchedulerOptions, StepCosts, next_kind, resolve_policy
from optimum_neuron.engine.request import Request, RequestState, RequestStatus
from optimum_neuron.engine.scheduler import WAITING_WINDOW, Scheduler
from optimum_neuron.engine.slots import SlotTable
from optimum_neuron.engine.step import PrefixReuse, Step, TokenEvent


TOKEN = 1
UNIQUE = iter(range(10_000, 10_000_000))


def make(
    slots: int = 4, chunk: int = 8, rows: int = 1, length: int = 256, buckets: tuple[int, ...] = (), **options: Any
) -> Scheduler:
    """A scheduler with mixed graphs unless the policy is one that has no use for them."""
    config = NeuronConfig(
        batch_size=slots,
        sequence_length=length,
        prefill_chunk_size=chunk,
        prefill_chunk_buckets=buckets,
        ctx_batch_size=rows,
        mixed_step=slots > 1 and options.get("policy", "mixed") == "mixed",
    )
    return Scheduler(config, SchedulerOptions(**options), min_reuse=2)


def request(name: str, prompt: int | list[int], new: int | None = 100, **fields: Any) -> Request:
    """A prompt given as a length shares no prefix with any other."""
    tokens = [next(UNIQUE) for _ in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(request_id=name, prompt_token_ids=tokens, max_new_tokens=new, **fields)


def add(scheduler: Scheduler, *requests: Request) -> None:
    for item in requests:
        scheduler.add(item)


Tokens = list[tuple[str, int, str | None]]


def commit(scheduler: Scheduler, step: Step, seconds: float | None = None) -> Tokens:
    events = scheduler.commit(step, [TOKEN] * len(step.decodes), [TOKEN] * len(step.chunks), seconds)
    scheduler.slots.check()
    return [(event.request_id, event.token_id, event.finish_reason) for event in events]


def advance(scheduler: Scheduler, steps: int = 1) -> Tokens:
    """Runs steps and returns the tokens of the last one."""
    events: Tokens = []
    for _ in range(steps):
        events = commit(scheduler, next_step(scheduler))
    return events


def next_step(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    assert step is not None
    return step


def counts(step: Step) -> dict[str, int]:
    return {chunk.request_id: chunk.count for chunk in step.chunks}


def with_decodes(number: int, **sizes: Any) -> Scheduler:
    """A scheduler in which `number` requests generate."""
    scheduler = make(**sizes)
    for index in range(number):
        add(scheduler, request(f"d{index}", 1))
        advance(scheduler)
        while scheduler.prefilling or scheduler.waiting:
            advance(scheduler)
    assert scheduler.running == number
    return scheduler


# What a step holds


def test_a_one_token_final_chunk_is_a_chunk() -> None:
    scheduler = make(chunk=8)
    add(scheduler, request("a", 9))
    advance(scheduler)
    step = next_step(scheduler)
    assert step.kind == "chunked_prefill" and not step.decodes and step.chunks[0].count == 1 and step.chunks[0].is_last
    assert commit(scheduler, step) == [("a", TOKEN, None)]


def test_an_intermediate_chunk_emits_nothing() -> None:
    scheduler = make(chunk=8)
    add(scheduler, request("a", 20))
    assert advance(scheduler) == [] and advance(scheduler) == []
    assert scheduler.state("a").output_token_ids == []
    assert advance(scheduler) == [("a", TOKEN, None)]


def test_an_unfinished_prompt_cannot_take_a_token() -> None:
    state = RequestState(request("a", 3), 0, 5)
    state.computed = 2
    with pytest.raises(RuntimeError, match="1 prompt tokens left"):
        state.append(TOKEN)


def test_pure_decode_is_token_generation_and_never_mixed() -> None:
    scheduler = with_decodes(2)
    step = next_step(scheduler)
    assert (step.kind, step.chunk_size, step.chunks) == ("token_generation", 0, ())
    assert [decode.slot for decode in step.decodes] == sorted(decode.slot for decode in step.decodes)
    add(scheduler, request("a", 3))
    assert next_step(scheduler).kind == "mixed"


def test_the_decodes_are_built_again_only_when_the_running_requests_change() -> None:
    scheduler = with_decodes(2)
    first = next_step(scheduler).decodes
    advance(scheduler)
    assert next_step(scheduler).decodes is first
    scheduler.abort("d0")
    assert [decode.request_id for decode in next_step(scheduler).decodes] == ["d1"]


def test_no_request_is_lost_between_chunks() -> None:
    scheduler = make(slots=2, chunk=4)
    add(scheduler, *(request(f"r{index}", 3 * index + 1, new=2) for index in range(6)))
    finished = []
    while scheduler.has_work:
        finished += [name for name, _, reason in advance(scheduler) if reason]
    assert sorted(finished) == [f"r{index}" for index in range(6)] and scheduler.schedule() is None


def test_requests_under_way_never_exceed_the_slots() -> None:
    scheduler = make(slots=2, chunk=4, max_bypass=9)
    add(scheduler, request("a", 100), request("b", 2, new=50), request("c", 2), request("d", 2))
    for _ in range(20):
        assert scheduler.prefilling + scheduler.running <= 2
        advance(scheduler)
    assert scheduler.waiting == 2


@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 15, 16, 17, 64])
@pytest.mark.parametrize("new", [1, 2])
def test_a_prompt_of_any_length_ends_after_as_many_steps_as_it_has_chunks(prompt: int, new: int) -> None:
    scheduler = make(chunk=8, length=64)
    if prompt + new - 1 > 64:
        new = 1
    add(scheduler, request("a", prompt, new=new))
    chunks = -(-prompt // 8)
    for _ in range(chunks - 1):
        assert advance(scheduler) == []
    reason = "length" if new == 1 else None
    assert advance(scheduler) == [("a", TOKEN, reason)]
    assert scheduler.has_work == (new > 1)


def test_one_new_token_finishes_with_the_final_chunk() -> None:
    scheduler = make()
    add(scheduler, request("a", 3, new=1))
    assert advance(scheduler) == [("a", TOKEN, "length")]
    assert scheduler.slots.free_count == 4 and not scheduler.has_work


def test_an_end_token_finishes_in_the_final_chunk_and_in_a_decode() -> None:
    scheduler = make()
    add(scheduler, request("a", 3, eos_token_ids=frozenset({TOKEN})), request("b", 3, eos_token_ids=frozenset({9})))
    assert advance(scheduler) == [("a", TOKEN, "stop")]
    advance(scheduler)
    assert scheduler.commit(next_step(scheduler), [9], []) == [TokenEvent("b", 9, "stop")]
    assert not scheduler.has_work


def test_without_a_limit_a_request_generates_what_its_slot_holds() -> None:
    scheduler = make(chunk=8, length=32)
    add(scheduler, request("a", 30, new=None))
    assert scheduler.state("a").max_new_tokens == 3
    advance(scheduler, 5)
    assert advance(scheduler) == [("a", TOKEN, "length")]


# Rows, budgets, thresholds, alignment


@pytest.mark.parametrize(
    ("decodes", "prompts", "budget", "expected"),
    [
        (0, [8000], 2048, {"p0": 2048}),
        (2, [8000], 2048, {"p0": 2046}),
        (1, [100], 2048, {"p0": 100}),
        (1, [8000, 8000], 2048, {"p0": 2047}),
        (3, [], 2048, {}),
        (3, [8000], 5, {"p0": 2}),
        (0, [100, 8000], 2048, {"p0": 100, "p1": 1948}),
        (0, [100, 50, 8000], 2048, {"p0": 100, "p1": 50}),
    ],
)
def test_the_budget_serves_decodes_first_and_prompts_in_order(
    decodes: int, prompts: list[int], budget: int, expected: dict[str, int]
) -> None:
    scheduler = with_decodes(decodes, rows=2, chunk=2048, length=9000, max_step_tokens=budget, max_bypass=0)
    add(scheduler, *(request(f"p{index}", length) for index, length in enumerate(prompts)))
    step = next_step(scheduler)
    assert (len(step.decodes), counts(step)) == (decodes, expected)


def test_a_prompt_larger_than_the_budget_still_finishes() -> None:
    scheduler = make(chunk=64, max_step_tokens=7)
    add(scheduler, request("a", 50))
    advance(scheduler, 7)
    assert advance(scheduler) == [("a", TOKEN, None)]


@pytest.mark.parametrize(
    ("prompts", "options", "expected"),
    [
        ([20], {"long_prefill_token_threshold": 8}, [8]),
        ([20, 20], {"long_prefill_token_threshold": 8}, [8, 8]),
        ([20, 20], {"long_prefill_token_threshold": 8, "max_step_tokens": 10}, [8, 2]),
        ([20], {}, [20]),
        ([5, 20], {"long_prefill_token_threshold": 8}, [5, 8]),
    ],
)
def test_a_threshold_limits_each_prompt_of_a_step(
    prompts: list[int], options: dict[str, int], expected: list[int]
) -> None:
    scheduler = make(chunk=32, rows=2, **options)
    add(scheduler, *(request(f"p{index}", length) for index, length in enumerate(prompts)))
    assert list(counts(next_step(scheduler)).values()) == expected
    if prompts == [20] and expected == [8]:
        advance(scheduler)
        assert counts(next_step(scheduler)) == {"p0": 8}


@pytest.mark.parametrize(
    ("prompt", "budget", "alignment", "expected"),
    [
        (100, None, 1, [32, 32, 32, 4]),
        (100, 30, 8, [24, 24, 24, 28]),
        (100, 30, 16, [16, 16, 16, 16, 16, 20]),
        (20, 6, 16, [6, 6, 4, 4]),
        (20, None, 16, [20]),
        (33, 32, 16, [32, 1]),
    ],
)
def test_only_a_truncated_chunk_is_aligned_and_never_to_zero(
    prompt: int, budget: int | None, alignment: int, expected: list[int]
) -> None:
    scheduler = make(slots=4, chunk=32, max_step_tokens=budget, chunk_alignment=alignment)
    add(scheduler, request("a", prompt))
    taken = []
    while scheduler.waiting or scheduler.prefilling:
        taken.append(next_step(scheduler).chunks[0].count)
        advance(scheduler)
    assert taken == expected


@pytest.mark.parametrize(
    ("prompts", "expected", "chunk_size"),
    [
        ([20], {"p0": 20}, 16),  # one prompt takes two rows
        ([40], {"p0": 32}, 16),
        ([8], {"p0": 8}, 4),
        ([9], {"p0": 9}, 16),
        ([4, 4], {"p0": 4, "p1": 4}, 4),
        ([1, 5], {"p0": 1, "p1": 5}, 16),
        ([20, 20], {"p0": 20}, 16),
        ([3, 3, 3], {"p0": 3, "p1": 3}, 4),  # a row never holds two prompts
    ],
)
def test_rows_hold_one_prompt_each_and_the_smallest_graph_is_chosen(
    prompts: list[int], expected: dict[str, int], chunk_size: int
) -> None:
    scheduler = make(chunk=16, buckets=(4,), rows=2, max_bypass=0)
    add(scheduler, *(request(f"p{index}", length) for index, length in enumerate(prompts)))
    step = next_step(scheduler)
    assert (counts(step), step.chunk_size) == (expected, chunk_size)


# Order


@pytest.mark.parametrize("max_bypass", [0, 1, 3])
def test_a_short_prompt_passes_a_long_one_at_most_max_bypass_times_in_a_row(max_bypass: int) -> None:
    scheduler = make(slots=4, chunk=4, max_bypass=max_bypass)
    add(scheduler, request("long", 200, new=50))
    order = []
    for index in range(12):
        add(scheduler, request(f"s{index}", 2, new=1))
        order.append(next(iter(counts(next_step(scheduler)))))
        advance(scheduler)
    turns = ["long" if index % (max_bypass + 1) == max_bypass else "short" for index in range(12)]
    assert ["long" if name == "long" else "short" for name in order] == turns


def test_the_prompt_that_is_due_gets_what_those_passing_it_leave() -> None:
    scheduler = make(chunk=4, rows=3, max_bypass=1)
    add(scheduler, request("long", 50), request("a", 3), request("b", 13), request("c", 4))
    step = next_step(scheduler)
    assert counts(step) == {"a": 3, "c": 4, "long": 4} and step.passed_over is None


def test_a_prompt_that_is_due_keeps_a_slot_from_those_passing_it() -> None:
    scheduler = with_decodes(3, chunk=4)
    add(scheduler, request("long", 50), request("short", 2))
    assert counts(next_step(scheduler)) == {"long": 4}


def test_a_lower_priority_number_goes_first_and_nothing_less_urgent_passes_it() -> None:
    scheduler = make(chunk=4)
    add(scheduler, request("late", 9, priority=5), request("soon", 9, priority=-1), request("short", 2, priority=5))
    order = []
    while scheduler.waiting or scheduler.prefilling:
        order += counts(next_step(scheduler))
        advance(scheduler)
    assert order == ["soon", "soon", "soon", "short", "late", "late", "late"]


def test_an_unfinished_prompt_goes_before_a_waiting_one_that_came_earlier() -> None:
    scheduler = make(slots=2, chunk=4, max_bypass=0)
    add(scheduler, request("first", 9, priority=1))
    advance(scheduler)
    add(scheduler, request("urgent", 2, priority=0, new=1))
    assert list(counts(next_step(scheduler))) == ["urgent"]
    advance(scheduler)
    add(scheduler, request("later", 2, priority=1))
    assert list(counts(next_step(scheduler))) == ["first"]


@pytest.mark.parametrize(
    ("policy", "kinds"),
    [
        ("mixed", "mmmmm"),
        ("alternate", "cdcdc"),
        ("prefill_first", "ccccc"),
        ("all_chunks", "cccdc"),
    ],
)
def test_prompts_and_decodes_share_steps_as_the_policy_says(policy: str, kinds: str) -> None:
    scheduler = with_decodes(1, chunk=4, policy=policy)
    if policy in ("alternate", "all_chunks"):
        assert next_step(scheduler).kind == "token_generation"
        advance(scheduler)
    add(scheduler, request("a", 10), request("b", 10))
    seen = ""
    for _ in kinds:
        seen += {"mixed": "m", "chunked_prefill": "c", "token_generation": "d"}[next_step(scheduler).kind]
        advance(scheduler)
    assert seen == kinds


def test_neither_decodes_nor_prompts_starve() -> None:
    for policy in ("mixed", "alternate", "all_chunks"):
        scheduler = with_decodes(1, chunk=4, policy=policy)
        for index in range(40):
            add(scheduler, request(f"p{index}", 6, new=2))
        before = len(scheduler.state("d0").output_token_ids)
        advance(scheduler, 60)
        assert len(scheduler.state("d0").output_token_ids) - before >= 20, policy
        assert scheduler.waiting < 30, policy


def test_a_policy_decides_from_five_facts() -> None:
    facts = {"decodes": True, "prompts": True, "after_chunks": True, "unfinished": True}
    assert next_kind("all_chunks", **facts) == "chunked_prefill"
    assert next_kind("all_chunks", **{**facts, "unfinished": False}) == "token_generation"
    assert next_kind("alternate", **{**facts, "after_chunks": False}) == "chunked_prefill"
    assert next_kind("mixed", **{**facts, "decodes": False}) == "chunked_prefill"
    assert next_kind("mixed", **{**facts, "prompts": False}) == "token_generation"
    assert next_kind("mixed", decodes=False, prompts=False, after_chunks=True, unfinished=False) is None


def test_an_atomic_prompt_is_taken_in_one_piece_whatever_the_limits() -> None:
    scheduler = make(chunk=16, buckets=(4,), rows=2, long_prefill_token_threshold=3, itl_target_ms=0.001)
    add(scheduler, request("d", 2))
    advance(scheduler)
    add(scheduler, request("image", 30, atomic=True), request("b", 9))
    step = next_step(scheduler)
    assert counts(step) == {"image": 30} and step.chunk_size == 16 and step.chunks[0].is_last


def test_an_atomic_prompt_that_does_not_fit_beside_others_is_skipped_but_not_for_ever() -> None:
    scheduler = make(chunk=4, rows=2, long_prefill_token_threshold=4, max_bypass=0)
    add(scheduler, request("a", 8), request("image", 8, atomic=True), request("b", 4), request("c", 8))
    assert counts(next_step(scheduler)) == {"a": 4, "b": 4}
    advance(scheduler)
    assert counts(next_step(scheduler)) == {"a": 4}  # c would be unfinished, and go before the image
    advance(scheduler)
    assert counts(next_step(scheduler)) == {"image": 8}


def test_a_step_looks_at_a_bounded_number_of_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(chunk=4, rows=2)
    add(scheduler, *(request(f"r{index}", 50) for index in range(1000)))
    looks = []
    may_share = SlotTable.may_share
    monkeypatch.setattr(SlotTable, "may_share", lambda *args: looks.append(1) or may_share(*args))
    next_step(scheduler)
    assert len(looks) == WAITING_WINDOW - 1


# Prefix reuse


def test_the_state_of_a_reused_slot_is_reset() -> None:
    scheduler = make(slots=1, chunk=8)
    add(scheduler, request("a", list(range(40)), new=1))
    advance(scheduler, 5)
    add(scheduler, request("b", [0, 1, 2, 77, 78], new=1))
    step = next_step(scheduler)
    assert step.chunks[0].reuse == PrefixReuse(0, 3) and (step.chunks[0].start, step.chunks[0].count) == (3, 2)
    commit(scheduler, step)
    assert scheduler.slots.contents(0).tolist() == [0, 1, 2, 77, 78]
    add(scheduler, request("c", list(range(40)), new=1))
    assert next_step(scheduler).chunks[0].reuse == PrefixReuse(0, 3)


def test_a_copied_prefix_is_part_of_the_new_contents() -> None:
    scheduler = make(chunk=16)
    add(scheduler, request("a", [5, 6, 7, 8]))
    advance(scheduler)
    add(scheduler, request("b", [5, 6, 7, 9]))
    step = next_step(scheduler)
    assert step.chunks[0].reuse == PrefixReuse(0, 3) and step.chunks[0].slot == 1
    commit(scheduler, step)
    assert scheduler.slots.contents(1).tolist() == [5, 6, 7, 9]


def test_a_prefix_hit_of_the_whole_prompt_still_runs_one_token() -> None:
    scheduler = make(chunk=8)
    for name in ("a", "b"):
        add(scheduler, request(name, list(range(8)), new=1))
        step = next_step(scheduler)
        assert commit(scheduler, step) == [(name, TOKEN, "length")]
    assert step.chunks[0].reuse == PrefixReuse(step.chunks[0].slot, 7)
    assert (step.chunks[0].start, step.chunks[0].count, step.chunks[0].is_last) == (7, 1, True)


def test_prefix_reuse_comes_before_the_budget() -> None:
    scheduler = make(chunk=32, rows=2, max_step_tokens=8)
    add(scheduler, request("a", list(range(20)), new=1))
    advance(scheduler, 3)
    add(scheduler, request("b", [*range(20), 90, 91, 92]), request("c", 30))
    step = next_step(scheduler)
    assert counts(step) == {"b": 3, "c": 5} and step.chunks[0].start == 20
    commit(scheduler, step)
    assert scheduler.state("b").prefix_hit == 20


def test_a_prompt_that_is_short_after_reuse_may_pass() -> None:
    scheduler = make(chunk=4)
    add(scheduler, request("a", list(range(20)), new=1))
    advance(scheduler, 5)
    add(scheduler, request("long", 30), request("b", [*range(20), 90, 91, 92, 93]))
    step = next_step(scheduler)
    assert counts(step) == {"b": 4} and step.passed_over is not None and step.passed_over.request_id == "long"


def test_without_prefix_reuse_every_token_is_computed() -> None:
    scheduler = make(chunk=16, prefix_reuse=False)
    for name in ("a", "b"):
        add(scheduler, request(name, list(range(8)), new=1))
        assert counts(next_step(scheduler)) == {name: 8}
        advance(scheduler)


def test_an_atomic_prompt_reuses_nothing() -> None:
    scheduler = make(chunk=16)
    add(scheduler, request("a", list(range(8)), new=1))
    advance(scheduler)
    add(scheduler, request("b", list(range(8)), atomic=True))
    assert counts(next_step(scheduler)) == {"b": 8}


def test_rows_of_an_atomic_prompt_are_not_reused() -> None:
    scheduler = make(chunk=16)
    add(scheduler, request("a", list(range(8)), new=3, atomic=True))
    advance(scheduler, 3)
    add(scheduler, request("b", list(range(8))))
    assert next_step(scheduler).chunks[0].reuse is None


@pytest.mark.parametrize(("reuse_generated", "length"), [(True, 5), (False, 3)])
def test_generated_tokens_are_reused_except_the_last_which_was_never_fed(reuse_generated: bool, length: int) -> None:
    scheduler = make(chunk=16, reuse_generated=reuse_generated)
    add(scheduler, request("a", [5, 6, 7], new=3))
    scheduler.commit(next_step(scheduler), [], [20])
    for token in (21, 22):
        scheduler.commit(next_step(scheduler), [token], [])
    add(scheduler, request("b", [5, 6, 7, 20, 21, 22, 9]))
    chunk = next_step(scheduler).chunks[0]
    assert chunk.reuse == PrefixReuse(chunk.slot, length) and chunk.count == 7 - length


def fill(table: SlotTable, slot: int, tokens: list[int], held: bool = False) -> None:
    table.hold(slot, f"r{slot}")
    table.write(slot, 0, np.array(tokens, np.int32))
    if not held:
        table.release(slot)


@pytest.mark.parametrize(
    ("held", "taken", "prompt", "expected"),
    [
        ((), (), [9, 9, 9, 9, 9], (2, None)),  # no match: the empty slot
        ((), (), [1, 2, 3, 4, 9], (0, PrefixReuse(0, 4))),  # all of slot 0: in place
        ((), (), [1, 2, 3, 9, 9], (2, PrefixReuse(0, 3))),  # part of it: a copy keeps the rest
        ((0,), (), [1, 2, 3, 4, 9], (2, PrefixReuse(0, 4))),  # a slot in use can only be copied
        ((), (0,), [1, 2, 3, 4, 9], (2, None)),  # a slot given away in this step is no source
        ((), (2,), [1, 2, 3, 9], (0, PrefixReuse(0, 3))),  # the source is the next to go anyway
        ((), (), [1, 2], (2, None)),  # one token at most could be reused: too few
        ((1, 2), (), [7, 8, 9, 9], (0, PrefixReuse(1, 3))),
    ],
)
def test_a_slot_is_picked_for_its_prefix_else_for_its_age(
    held: tuple[int, ...], taken: tuple[int, ...], prompt: list[int], expected: tuple[int, PrefixReuse | None]
) -> None:
    table = SlotTable(3, 16, min_reuse=2)
    fill(table, 0, [1, 2, 3, 4], held=0 in held)
    fill(table, 1, [7, 8, 9], held=1 in held)
    if 2 in held:
        table.hold(2, "r2")
    assert table.assign(np.array(prompt, np.int32), taken, True) == expected
    table.check()


def test_an_empty_slot_is_taken_before_one_whose_contents_may_be_of_use() -> None:
    table = SlotTable(2, 16)
    fill(table, 0, [1, 2, 3])
    fill(table, 1, [])
    assert table.assign(np.array([7], np.int32), (), True) == (1, None)


def test_a_slot_is_held_once_and_released_once() -> None:
    table = SlotTable(2, 8)
    table.hold(0, "a")
    with pytest.raises(RuntimeError, match="held by request 'a'"):
        table.hold(0, "b")
    table.release(0)
    with pytest.raises(RuntimeError, match="free"):
        table.release(0)
    assert table.free_slots == [0, 1]


# Abort


def test_an_abort_frees_the_slot_once_in_every_state() -> None:
    scheduler = make(slots=2, chunk=4, max_bypass=0)
    add(scheduler, request("running", 2), request("prefilling", 9), request("waiting", 9))
    advance(scheduler, 2)
    expected = {
        "running": RequestStatus.RUNNING,
        "prefilling": RequestStatus.PREFILLING,
        "waiting": RequestStatus.WAITING,
    }
    assert {name: scheduler.state(name).status for name in expected} == expected
    for name, free in (("waiting", 0), ("prefilling", 1), ("running", 2)):
        assert scheduler.abort(name) and not scheduler.abort(name)
        scheduler.slots.check()
        assert scheduler.slots.free_count == free
    assert not scheduler.abort("unknown") and not scheduler.has_work and scheduler.schedule() is None


def test_a_step_under_way_drops_the_tokens_of_aborted_requests() -> None:
    scheduler = make(slots=3, chunk=4, rows=2, max_bypass=0)
    add(scheduler, request("running", 2))
    advance(scheduler)
    add(scheduler, request("started", 3), request("other", 3))
    step = next_step(scheduler)
    assert scheduler.abort("running") and scheduler.abort("started")
    assert commit(scheduler, step) == [("other", TOKEN, None)]
    assert scheduler.slots.free_count == 2


def test_contents_that_a_step_under_way_overwrote_are_not_reused_after_an_abort() -> None:
    scheduler = make(slots=1, chunk=8)
    add(scheduler, request("a", list(range(6)), new=1))
    advance(scheduler)
    add(scheduler, request("b", [60, 61, 62]))
    step = next_step(scheduler)
    scheduler.abort("b")
    commit(scheduler, step)
    add(scheduler, request("c", list(range(6))))
    assert next_step(scheduler).chunks[0].reuse is None


def test_a_new_request_with_the_id_of_an_aborted_one_gets_none_of_its_tokens() -> None:
    scheduler = make(chunk=8)
    add(scheduler, request("a", 3))
    step = next_step(scheduler)
    scheduler.abort("a")
    add(scheduler, request("a", 5))
    assert commit(scheduler, step) == [] and scheduler.state("a").status is RequestStatus.WAITING


def test_an_aborted_prompt_is_reusable_as_far_as_it_was_committed() -> None:
    scheduler = make(chunk=4)
    add(scheduler, request("a", list(range(20))))
    advance(scheduler, 2)
    scheduler.abort("a")
    add(scheduler, request("b", list(range(20))))
    assert next_step(scheduler).chunks[0].reuse == PrefixReuse(0, 8)


# Refusals


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("x", 0), "0 prompt tokens"),
        (request("x", 3, new=0), "max_new_tokens=0"),
        (request("x", 250, new=8), "250 prompt tokens and max_new_tokens=8 exceeds sequence_length=256"),
        (request("x", 257, new=None), "257 prompt tokens exceeds sequence_length=256"),
        (request("live", 3), "is not finished"),
        (request("x", 17, atomic=True), r"17 prompt tokens.* 2 \* 8 = 16"),
        (request("x", 10, atomic=True), "leaves 9 for prompts.* by 1"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_and_counted(bad: Request, message: str) -> None:
    scheduler = make(slots=4, chunk=8, rows=2, max_step_tokens=12)
    add(scheduler, request("live", 250, new=7), request("image", 9, atomic=True))
    with pytest.raises(ValueError, match=message):
        scheduler.check(bad)
    assert scheduler.rejected == 0
    with pytest.raises(ValueError, match=message):
        scheduler.add(bad)
    assert scheduler.rejected == 1 and scheduler.waiting == 2


@pytest.mark.parametrize(
    ("tokens", "error"), [([1.5], TypeError), ([[1, 2]], ValueError), ([-1], ValueError), ([2**31], ValueError)]
)
def test_a_prompt_is_a_row_of_token_ids(tokens: list[Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="'x'"):
        request("x", tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fifo"}, "policy='fifo' is not known"),
        ({"max_step_tokens": 0}, "max_step_tokens=0"),
        ({"max_step_tokens": 4}, "must exceed batch_size=4"),
        ({"long_prefill_token_threshold": -1}, "at least 0"),
        ({"itl_target_ms": 0}, "itl_target_ms=0"),
        ({"itl_target_ms": 5.0, "policy": "all_chunks"}, "choose policy 'mixed' or 'alternate'"),
        ({"max_bypass": -1}, "max_bypass=-1"),
        ({"chunk_alignment": 0}, "chunk_alignment=0"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(slots=4, **options)


def test_mixed_steps_need_mixed_graphs() -> None:
    assert resolve_policy("auto", True) == "mixed" and resolve_policy("auto", False) == "alternate"
    with pytest.raises(ValueError, match="mixed_step=True"):
        resolve_policy("mixed", False)


def test_a_step_is_committed_once_and_with_all_its_tokens() -> None:
    scheduler = make(chunk=4)
    add(scheduler, request("a", 9))
    step = next_step(scheduler)
    with pytest.raises(ValueError, match="1 chunks got 0 and 0 tokens"):
        scheduler.commit(step, [], [])
    commit(scheduler, step)
    with pytest.raises(RuntimeError, match="does not continue"):
        scheduler.commit(step, [], [TOKEN])


# Chunk sizes from measured times


def costs(*times: tuple[Any, int, float]) -> StepCosts:
    table = StepCosts()
    for time in times:
        table.record(*time)
    return table


@pytest.mark.parametrize(
    ("times", "target", "expected"),
    [
        ([], 1.0, 64),  # nothing known: the smallest
        ([("mixed", 64, 0.03)], 0.1, 128),  # without the decode time the estimate is proportional: .06 and .12
        ([("mixed", 64, 0.03), ("token_generation", 0, 0.02)], 0.1, 256),  # .02 + .01 * size / 64
        ([("mixed", 64, 0.03), ("token_generation", 0, 0.02)], 0.05, 128),
        ([("mixed", 64, 0.03), ("mixed", 256, 0.2), ("token_generation", 0, 0.02)], 0.1, 128),
        ([("mixed", 64, 0.3)], 0.1, 64),  # never below the smallest
    ],
)
def test_the_largest_chunk_within_the_target_is_chosen(
    times: list[tuple[Any, int, float]], target: float, expected: int
) -> None:
    assert costs(*times).largest_within(target, (64, 128, 256), "mixed") == expected


def test_between_chunk_and_decode_steps_the_pause_is_both() -> None:
    table = costs(("chunked_prefill", 64, 0.03), ("chunked_prefill", 128, 0.05), ("token_generation", 0, 0.02))
    assert table.largest_within(0.07, (64, 128), "chunked_prefill") == 128
    assert table.largest_within(0.069, (64, 128), "chunked_prefill") == 64


def test_a_size_that_was_slow_once_is_tried_again_and_a_hiccup_does_not_count() -> None:
    table = costs(("mixed", 64, 0.02), ("token_generation", 0, 0.01), *[("mixed", 128, 0.03)] * 3, ("mixed", 128, 9.0))
    assert table.largest_within(0.05, (64, 128), "mixed") == 128
    for _ in range(9):
        table.record("mixed", 128, 9.0)
    assert table.largest_within(0.05, (64, 128), "mixed") == 64
    for _ in range(129):
        table.record("mixed", 64, 0.02)
    assert table.largest_within(0.05, (64, 128), "mixed") == 128


def test_a_target_limits_chunks_only_while_someone_decodes() -> None:
    scheduler = make(slots=2, chunk=64, buckets=(8,), length=256, itl_target_ms=5.0)
    add(scheduler, request("a", 100))
    assert counts(next_step(scheduler)) == {"a": 64}
    advance(scheduler, 2)
    add(scheduler, request("b", 100))
    step = next_step(scheduler)
    assert (step.kind, step.chunk_size) == ("mixed", 8)
    commit(scheduler, step, 0.0001)
    commit(scheduler, next_step(scheduler), 0.0001)
    assert next_step(scheduler).chunk_size == 64


def test_the_scheduler_needs_no_torch() -> None:
    code = "import sys; import optimum_neuron.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
