# SPDX-License-Identifier: Apache-2.0
"""Which blocks rows get, what of a prompt is found in them, and who gives theirs back; test_scheduler_fuzz.py has the invariants."""

from __future__ import annotations

import numpy as np
import pytest
from invariants import check_pool
from scheduling import TOKEN, add, advance, commit, next_step, request

from optimum_neuron.config import NeuronConfig
from optimum_neuron.engine.block_pool import BlockMatch, BlockPool
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.engine.scheduler import Scheduler
from optimum_neuron.engine.step import BlockCopy, PrefixReuse


def make(rows: int = 3, blocks: int = 4) -> Scheduler:
    config = NeuronConfig(
        batch_size=rows,
        sequence_length=256,
        prefill_chunk_size=128,
        kv_block_size=64,
        kv_cache_tokens=64 * blocks,
        mixed_step=rows > 1,
    )
    return Scheduler(config, SchedulerOptions(), min_reuse=16)


def filled(*rows: tuple[list[int], list[int]]) -> BlockPool:
    pool = BlockPool(6, 4, 2)
    for blocks, tokens in rows:
        pool.acquire(blocks, fresh=True)
        pool.write(blocks, 0, np.array(tokens, np.int32))
        pool.release(blocks)
        check_pool(pool)
    return pool


FIRST = ([0, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], BlockMatch((0, 1), 2, 2, True)),
        ([1, 2, 3, 4, 5, 6, 7, 8], BlockMatch((0,), 1, 3, False)),  # the last token is left to compute
        ([1, 2, 3, 4, 5, 9, 9, 9], BlockMatch((0,), 0, 0, False)),  # one token is too few to copy
        ([1, 2, 3, 9, 9], BlockMatch((), 0, 3, False)),
        ([5, 6, 7, 8, 9], BlockMatch((), 0, 0, False)),  # block 1's tokens, but not what precedes them
    ],
)
def test_a_prompt_finds_full_blocks_and_part_of_one(prompt: list[int], expected: BlockMatch) -> None:
    assert filled(FIRST).match(np.array(prompt, np.int32)) == expected


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (10, BlockMatch((0, 1), 2, 2, True)),
        (9, BlockMatch((0, 1), 2, 1, True)),
        (8, BlockMatch((0, 1), 0, 0, False)),
        (6, BlockMatch((0,), 1, 2, False)),  # part of a full block
        (4, BlockMatch((0,), 0, 0, False)),
        (0, BlockMatch((), 0, 0, False)),
    ],
)
def test_as_much_of_a_match_is_taken_as_a_snapshot_is_of(length: int, expected: BlockMatch) -> None:
    assert BlockMatch((0, 1), 2, 2, True).first(length, 4) == expected


def test_empty_blocks_go_first_from_the_lowest_then_the_least_recently_used_from_the_last() -> None:
    pool = filled(FIRST, ([4], [7, 7, 7]))
    assert list(pool.candidates()) == [3, 5, 2, 1, 0, 4]
    pool.touch(2)
    assert list(pool.candidates()) == [3, 5, 1, 0, 4, 2]
    pool.acquire([1], fresh=True)
    assert pool.match(np.array(FIRST[1], np.int32)).shared == (0,)


def test_a_block_that_is_read_is_not_written_anew() -> None:
    pool = filled(FIRST)
    pool.acquire([0], fresh=False)
    with pytest.raises(RuntimeError, match="block 0 has 1 rows"):
        pool.acquire([0], fresh=True)
    with pytest.raises(RuntimeError, match="block 1 is free"):
        pool.release([1])


def test_a_full_block_is_shared_and_part_of_the_next_copied() -> None:
    scheduler = make(blocks=8)
    prompt = list(range(100))
    add(scheduler, request("a", prompt, new=50))
    advance(scheduler)
    add(scheduler, request("b", [*prompt, 7, 8], new=10))
    step = next_step(scheduler)
    assert step.chunks[0].reuse == PrefixReuse(None, 100) and step.copies == (BlockCopy(1, 2, 36),)
    assert [(each.blocks, each.shared) for each in step.assignments] == [((0, 2), 1)]
    commit(scheduler, step)
    assert scheduler.slots.used == 3


@pytest.mark.parametrize(("young", "last"), [(0, "young"), (1, "young"), (-1, "old")])
def test_the_last_by_priority_and_arrival_gives_its_blocks_back_and_goes_on_where_it_was(
    young: int, last: str
) -> None:
    scheduler = make()
    add(scheduler, request("old", 60, new=190), request("young", 60, new=190, priority=young))
    preempted, tokens = [], []
    while scheduler.has_work:
        step = next_step(scheduler)
        preempted += [gone.request_id for gone in step.preempted]
        tokens += [name for name, token, _ in commit(scheduler, step) if token == TOKEN]
    assert preempted == [last]
    assert tokens.count("old") == tokens.count("young") == 190 and scheduler.slots.used == 0


def test_an_abort_of_a_preempted_request_while_the_step_runs_loses_no_block() -> None:
    scheduler = make(rows=2)
    add(scheduler, request("old", 60, new=190), request("young", 62, new=150))
    while not (step := next_step(scheduler)).preempted:
        commit(scheduler, step)
    assert step.preempted[0].request_id == "young" and scheduler.abort("young")
    commit(scheduler, step)
    while scheduler.has_work:
        advance(scheduler)
    assert scheduler.slots.used == 0


@pytest.mark.parametrize("other", [0, 200])
def test_a_long_request_waits_no_longer_than_those_that_have_rows_among_short_ones_that_never_cease(
    other: int,
) -> None:
    """It needs all blocks but one. Shorter ones fit before it at all times, also while another long prompt is taken in."""
    scheduler = make(rows=4, blocks=5)
    names = iter(range(10_000))

    def keep_waiting() -> None:
        while scheduler.waiting < 3:
            add(scheduler, request(f"short {next(names)}", 30, new=40))

    for _ in range(100):
        keep_waiting()
        advance(scheduler)
    ahead = scheduler.waiting + 4 + scheduler.options.max_bypass  # who waits, who has a row, who may pass
    if other:
        add(scheduler, request("other", other, new=40))
    add(scheduler, request("long", 200, new=57))
    steps = 0
    while scheduler.state("long").slot is None:
        keep_waiting()
        advance(scheduler)
        steps += 1
        assert steps <= 40 * (ahead + bool(other))
    tokens = len(scheduler.state("long").output_token_ids)
    while tokens < 57:
        keep_waiting()
        step = next_step(scheduler)
        assert "long" not in {gone.request_id for gone in step.preempted}
        tokens += [name for name, *_ in commit(scheduler, step)].count("long")
