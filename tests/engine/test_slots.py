# SPDX-License-Identifier: Apache-2.0
"""Whose tokens a slot holds, which of them a prompt reuses, and what an abort leaves behind."""

from __future__ import annotations

import numpy as np
import pytest
from invariants import check_cache
from scheduling import add, advance, commit, counts, make, next_step, request

from optimum_neuron.config import NeuronConfig
from optimum_neuron.engine.block_table import BlockDraft, BlockTable


def test_prefix_reuse_comes_before_the_budget() -> None:
    scheduler = make(chunk=32, rows=2, max_step_tokens=8)
    add(scheduler, request("a", list(range(20)), new=1))
    advance(scheduler, 3)
    add(scheduler, request("b", [*range(20), 90, 91, 92]), request("c", 30))
    step = next_step(scheduler)
    assert counts(step) == {"b": 3, "c": 5} and step.pieces[0].start == 20
    assert step.pieces[0].prefix is not None and step.pieces[0].prefix.length == 20


def test_a_prompt_that_is_short_after_reuse_may_pass() -> None:
    scheduler = make(chunk=4)
    add(scheduler, request("a", list(range(20)), new=1))
    advance(scheduler, 5)
    add(scheduler, request("long", 30), request("b", [*range(20), 90, 91, 92, 93]))
    step = next_step(scheduler)
    assert counts(step) == {"b": 4} and step.passed_over is not None and step.passed_over.request_id == "long"


@pytest.mark.parametrize(("reuse_generated", "length"), [(True, 5), (False, 3)])
def test_generated_tokens_are_reused_except_the_last_which_was_never_fed(reuse_generated: bool, length: int) -> None:
    scheduler = make(chunk=16, reuse_generated=reuse_generated)
    add(scheduler, request("a", [5, 6, 7], new=3))
    scheduler.commit(next_step(scheduler), [], [20])
    for token in (21, 22):
        scheduler.commit(next_step(scheduler), [token], [])
    add(scheduler, request("b", [5, 6, 7, 20, 21, 22, 9]))
    chunk = next_step(scheduler).pieces[0]
    assert chunk.prefix.length == length and chunk.count == 7 - length


def table_of(slots: int, length: int = 16, min_reuse: int = 2) -> BlockTable:
    return BlockTable(NeuronConfig(batch_size=slots, sequence_length=length, prefill_chunk_size=8), min_reuse)


def fill(table: BlockTable, slot: int, tokens: list[int], held: bool = False) -> None:
    table.hold_row(slot, f"r{slot}")
    table.give_blocks(slot, [slot])
    table.write_tokens(slot, 0, np.array(tokens, np.int32))
    if not held:
        table.release_row(slot)


@pytest.mark.parametrize(
    ("held", "taken", "prompt", "expected"),
    [
        ((), (), [9, 9, 9, 9, 9], (2, 0)),  # no match: the empty slot
        ((), (), [1, 2, 3, 4, 9], (0, 4)),  # all of slot 0: in place
        ((), (), [1, 2, 3, 4], (0, 3)),  # its last token is computed once more, in place
        ((), (), [1, 2, 3, 9, 9], (2, 3)),  # part of it: a copy keeps the rest
        ((0,), (), [1, 2, 3, 4, 9], (2, 4)),  # a slot in use can only be copied
        ((), (0,), [1, 2, 3, 4, 9], (2, 0)),  # a slot given away in this step is no source
        ((), (2,), [1, 2, 3, 9], (0, 3)),  # the source is the next to go anyway
        ((), (), [1, 2], (2, 0)),  # one token at most could be reused: too few
        ((1, 2), (), [7, 8, 9, 9], (0, 3)),
    ],
)
def test_a_slot_is_picked_for_its_prefix_else_for_its_age(
    held: tuple[int, ...], taken: tuple[int, ...], prompt: list[int], expected: tuple[int, int]
) -> None:
    table = table_of(3)
    fill(table, 0, [1, 2, 3, 4], held=0 in held)
    fill(table, 1, [7, 8, 9], held=1 in held)
    if 2 in held:
        fill(table, 2, [], held=True)
    draft = BlockDraft(table)
    draft._given.update(taken)
    slot, prefix = draft.place_prompt(np.array(prompt, np.int32), True)
    assert (slot, prefix.length) == expected
    check_cache(table)


def test_an_empty_slot_is_taken_before_one_with_contents_of_use() -> None:
    table = table_of(2)
    fill(table, 0, [1, 2, 3])
    fill(table, 1, [5])  # too little to be reused
    assert BlockDraft(table).place_prompt(np.array([7], np.int32), True)[0] == 1


def test_a_row_is_held_once_and_released_once() -> None:
    table = table_of(2)
    table.hold_row(0, "a")
    with pytest.raises(RuntimeError, match="held by request 'a'"):
        table.hold_row(0, "b")
    table.release_row(0)
    with pytest.raises(RuntimeError, match="free"):
        table.release_row(0)
    assert table.free_rows == [0, 1]


def test_a_new_request_with_the_id_of_an_aborted_one_gets_none_of_its_tokens() -> None:
    scheduler = make(chunk=8)
    add(scheduler, request("a", 3))
    step = next_step(scheduler)
    scheduler.abort_request("a")
    add(scheduler, request("a", 5))
    assert commit(scheduler, step) == [] and scheduler.queues.live["a"].slot is None


def test_an_aborted_prompt_is_reusable_as_far_as_it_was_committed() -> None:
    scheduler = make(chunk=4)
    add(scheduler, request("a", list(range(20))))
    advance(scheduler, 2)
    scheduler.abort_request("a")
    add(scheduler, request("b", list(range(20))))
    assert next_step(scheduler).pieces[0].prefix.length == 8
