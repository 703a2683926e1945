# SPDX-License-Identifier: Apache-2.0
"""Which request a step advances first: age, priority, policy, and who may pass whom."""

from __future__ import annotations

import pytest
from scheduling import add, advance, counts, make, next_step, request, with_decodes

from optimum_neuron.engine.block_table import BlockDraft
from optimum_neuron.engine.policy import next_kind
from optimum_neuron.engine.scheduler import WAITING_WINDOW


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
    while scheduler.queues.waiting or scheduler.queues.prefilling:
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
    [("mixed", "mmmmm"), ("alternate", "cdcdc"), ("prefill_first", "ccccc"), ("all_chunks", "cccdc")],
)
def test_prompts_and_decodes_share_steps_as_the_policy_says(policy: str, kinds: str) -> None:
    scheduler = with_decodes(1, chunk=4, policy=policy)
    if policy in ("alternate", "all_chunks"):
        assert next_step(scheduler).graph.kind == "token_generation"
        advance(scheduler)
    add(scheduler, request("a", 10), request("b", 10))
    seen = ""
    for _ in kinds:
        seen += {"mixed": "m", "chunked_prefill": "c", "token_generation": "d"}[next_step(scheduler).graph.kind]
        advance(scheduler)
    assert seen == kinds


def test_neither_decodes_nor_prompts_starve() -> None:
    for policy in ("mixed", "alternate", "all_chunks"):
        scheduler = with_decodes(1, chunk=4, policy=policy)
        for index in range(40):
            add(scheduler, request(f"p{index}", 6, new=2))
        before = len(scheduler.queues.live["d0"].output_token_ids)
        advance(scheduler, 60)
        assert len(scheduler.queues.live["d0"].output_token_ids) - before >= 20, policy
        assert len(scheduler.queues.waiting) < 30, policy


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
    assert counts(step) == {"image": 30} and step.graph.chunk_size == 16 and step.pieces[0].is_last


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
    find = BlockDraft.find_prefix
    monkeypatch.setattr(BlockDraft, "find_prefix", lambda *args: looks.append(1) or find(*args))
    next_step(scheduler)
    assert WAITING_WINDOW - 1 <= len(looks) <= WAITING_WINDOW + 1
