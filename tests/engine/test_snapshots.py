# SPDX-License-Identifier: Apache-2.0
"""Snapshots of state: where they are taken, who goes on behind them, and which one makes room; test_scheduler_fuzz.py has the invariants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from invariants import check_snapshots
from scheduling import add, advance, commit, counts, next_step, request

from optimum_neuron.config import NeuronConfig
from optimum_neuron.core import BlockCopy, Prefix, Step
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.engine.scheduler import Scheduler
from optimum_neuron.engine.snapshots import SnapshotTable


TEXT = list(range(40))


def make(
    places: int | None = 4,
    slots: int = 4,
    chunk: int = 8,
    blocks: int = 0,
    interval: int | None = None,
    **options: Any,
) -> Scheduler:
    config = NeuronConfig(
        batch_size=slots,
        sequence_length=256,
        prefill_chunk_size=chunk,
        state_snapshot_interval=interval,
        **{"kv_block_size": 64, "kv_cache_tokens": 64 * blocks} if blocks else {},
    )
    return Scheduler(config, SchedulerOptions(**options), min_reuse=2, state_places=places)


def kept(step: Step) -> list[tuple[str, int, int]]:
    return [(each.request_id, each.length, each.place) for each in step.kept]


def table(*texts: list[int], places: int = 3) -> SnapshotTable:
    made = SnapshotTable(places, min_reuse=2, largest_step=8)
    for place, text in enumerate(texts):
        made.set_place(place, np.array(text, np.int32))
    check_snapshots(made)
    return made


@pytest.mark.parametrize(
    ("prompt", "common", "has", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], 5, 5, Prefix(4, state=1)),  # the longest that it has
        ([1, 2, 3, 4], 4, 9, Prefix(2, state=0)),  # the last token is computed: one is not worth another snapshot
        ([1, 2, 3, 4], 4, 4, Prefix(2, state=0)),
        ([1, 2, 3, 9, 9], 3, 9, Prefix(2, state=0)),
        ([1, 2, 8, 8, 8, 8], 5, 9, Prefix(2, state=0, cut=5)),  # parts from others far behind it
        ([1, 2, 8, 8, 8, 8], 5, 5, Prefix(2, state=0)),  # nobody goes on behind these: nothing to part from
        ([1, 2, 3, 4, 5, 6], 1, 9, Prefix()),  # a snapshot without its rows is of no use
        ([7, 7, 7, 7], 3, 9, Prefix(0, state=None, cut=3)),
    ],
)
def test_a_prompt_goes_on_behind_the_longest_snapshot(
    prompt: list[int], common: int, has: int, expected: Prefix
) -> None:
    made = table([1, 2], [1, 2, 3, 4], [5, 6, 7])
    assert made.resume_prompt(np.array(prompt, np.int32), common, has=has) == expected


def pick(made: SnapshotTable, *texts: list[int], needed: tuple[int, ...] = ()) -> list[int | None]:
    check_snapshots(made)
    named = {str(number): np.array(text, np.int32) for number, text in enumerate(texts)}
    found = made.pick_places(named, needed)
    return [found.get(name) for name in named]


def test_empty_places_go_first_then_the_least_recently_used_and_none_that_is_needed() -> None:
    made = table([1, 2], [3, 4], places=4)
    texts = [[5, 6], [1, 2], [5, 6], [7, 8], [9, 9], [8, 8]]
    assert pick(made, *texts, needed=(1,)) == [2, None, None, 3, 0, None]
    for place, text in ((2, [5, 6]), (3, [7, 8])):
        made.set_place(place, np.array(text, np.int32))
    made.touch_place(0)
    assert pick(made, *texts[4:]) == [1, 2]
    made.set_place(0, None)  # of a request that was aborted meanwhile
    assert pick(made, *texts[4:]) == [0, 1]


def test_what_a_prompt_continued_after_stays_longer_but_not_more_than_half_of_all() -> None:
    made = table([1, 2], [3, 4], [5, 6], [7, 8], places=4)
    news = [[9, number] for number in range(4)]
    made.touch_place(0)
    made.touch_place(2)
    assert pick(made, *news) == [1, 3, 0, 2]
    made.touch_place(3)
    assert pick(made, *news) == [1, 0, 2, 3]
    made.set_place(2, np.array(news[0], np.int32))
    assert pick(made, *news[1:]) == [1, 0, 2]


@pytest.mark.parametrize(
    ("interval", "lengths"),
    [(None, [32, 38]), (1, [8, 16, 24, 32, 38]), (10, [16, 24, 32, 38]), (16, [16, 32, 38]), (17, [24, 32, 38])],
)
def test_one_is_taken_at_the_end_of_a_prompt_where_its_rest_fits_a_step_and_every_so_many_tokens(
    interval: int | None, lengths: list[int]
) -> None:
    scheduler = make(places=8, interval=interval)
    add(scheduler, request("a", TEXT[:38], new=2), request("b", 3, new=1))
    found = []
    while scheduler.has_work:
        step = next_step(scheduler)
        found += kept(step)
        commit(scheduler, step)
    assert found[0] == ("b", 3, 0) and [length for name, length, _ in found if name == "a"] == lengths


def test_full_blocks_are_shared_up_to_the_snapshot_and_part_of_the_next_is_copied() -> None:
    scheduler = make(chunk=128, blocks=12)
    prompt = list(range(150))
    add(scheduler, request("a", prompt[:100], new=20))
    advance(scheduler, 2)
    add(scheduler, request("b", [*prompt[:100], 7, 8], new=10))
    step = next_step(scheduler)
    assert step.pieces[0].prefix == Prefix(100, (0,), 1, state=0) and step.copies == (BlockCopy(1, 2, 36),)
    assert [(each.blocks, each.shared) for each in step.assignments] == [((0, 2), 1)]


def test_rows_without_a_snapshot_are_not_reused_and_none_are_kept_where_nothing_is_reused() -> None:
    for scheduler in (make(places=0, chunk=32), make(chunk=32, prefix_reuse=False)):
        for name in "abc":
            add(scheduler, request(name, TEXT[:20], new=1))
            step = next_step(scheduler)
            assert step.pieces[0].prefix is None and step.pieces[0].is_last and not step.kept
            commit(scheduler, step)


def test_a_prompt_that_is_cut_passes_one_that_has_begun_and_no_other() -> None:
    scheduler = make(chunk=32, slots=6)
    add(scheduler, request("a", [*TEXT[:20], 90, 91, 92], new=1))
    advance(scheduler)
    add(scheduler, request("long", 70, new=1), request("b", [*TEXT[:20], 80, 81], new=1), request("short", 5, new=1))
    assert counts(next_step(scheduler)) == {"short": 5}
    advance(scheduler, 2)
    assert scheduler.queues.live["long"].computed == 32
    order = []
    for _ in range(3):
        order.append(counts(next_step(scheduler)))
        advance(scheduler)
    assert order == [{"b": 20}, {"b": 2}, {"long": 32}]


def test_a_prefix_that_ends_with_a_full_block_which_is_copied_keeps_it() -> None:
    """Where a step writes to a full block, a row copies an equal one."""
    copied = Prefix(6, (7,), 3, ends=True)
    assert copied.shorten(5, 4) == Prefix(5, (7,), 3, ends=True) and copied.shorten(4, 4) == Prefix(4, (7,))
    assert copied.shorten(2, 4) == Prefix(2, (), 7)
    assert Prefix(4, (), 3).shorten(4, 4) == Prefix(4, (), 3) and Prefix(8, (7,), 3).shorten(8, 4) == Prefix(
        8, (7,), 3
    )
