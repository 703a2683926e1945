# SPDX-License-Identifier: Apache-2.0
"""Whose tokens a slot holds, which of them a prompt reuses, and what an abort leaves behind."""

from __future__ import annotations

import numpy as np
import pytest
from invariants import check_cache
from scheduling import TOKEN, add, advance, commit, counts, make, next_step, request

from optimum_neuron.engine.request import RequestStatus
from optimum_neuron.engine.slots import SlotTable
from optimum_neuron.engine.step import PrefixReuse


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
    assert step.chunks[0].reuse is not None and step.chunks[0].reuse.length == 20


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
    assert table.assign(np.array(prompt, np.int32), taken, True)[:2] == expected
    check_cache(table)


def test_an_empty_slot_is_taken_before_one_whose_contents_may_be_of_use() -> None:
    table = SlotTable(2, 16)
    fill(table, 0, [1, 2, 3])
    fill(table, 1, [])
    assert table.assign(np.array([7], np.int32), (), True)[:2] == (1, None)


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
        check_cache(scheduler.slots)
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
