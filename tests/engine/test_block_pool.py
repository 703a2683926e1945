# SPDX-License-Identifier: Apache-2.0
"""Which blocks rows get, what of a prompt is found in them, and who gives theirs back; test_scheduler_fuzz.py has the invariants."""

from __future__ import annotations

import numpy as np
import pytest
from invariants import check_pool
from scheduling import add, advance, commit, next_step, request

from optimum_neuron.config import NeuronConfig
from optimum_neuron.core import Prefix
from optimum_neuron.engine.block_pool import BlockPool
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.engine.scheduler import Scheduler


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
        pool.acquire_blocks(blocks, fresh=True)
        pool.write_tokens(blocks, 0, np.array(tokens, np.int32))
        pool.release_blocks(blocks)
        check_pool(pool)
    return pool


FIRST = ([0, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], Prefix(10, (0, 1), 2, True)),
        ([1, 2, 3, 4, 5, 6, 7, 8], Prefix(7, (0,), 1, False)),  # the last token is left to compute
        ([1, 2, 3, 4, 5, 9, 9, 9], Prefix(4, (0,), None, False)),  # one token is too few to copy
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], Prefix(8, (0, 1))),  # all but the last token would be one token
        ([1, 2, 3, 9, 9], Prefix(3, (), 0, False)),
        ([5, 6, 7, 8, 9], Prefix()),  # block 1's tokens, but not what precedes them
    ],
)
def test_a_prompt_finds_full_blocks_and_part_of_one(prompt: list[int], expected: Prefix) -> None:
    assert filled(FIRST).match_prompt(np.array(prompt, np.int32)) == expected


def test_empty_blocks_go_first_from_the_lowest_then_the_least_recently_used_from_the_last() -> None:
    pool = filled(FIRST, ([4], [7, 7, 7]))
    assert list(pool.list_free()) == [3, 5, 2, 1, 0, 4]
    pool.touch_block(2)
    assert list(pool.list_free()) == [3, 5, 1, 0, 4, 2]
    pool.acquire_blocks([1], fresh=True)
    assert pool.match_prompt(np.array(FIRST[1], np.int32)).blocks == (0,)


def test_a_block_that_is_read_is_not_written_anew() -> None:
    pool = filled(FIRST)
    pool.acquire_blocks([0], fresh=False)
    with pytest.raises(RuntimeError, match="block 0 has 1 rows"):
        pool.acquire_blocks([0], fresh=True)
    with pytest.raises(RuntimeError, match="block 1 is free"):
        pool.release_blocks([1])


@pytest.mark.parametrize("other", [0, 200])
def test_a_long_request_waits_no_longer_than_those_that_have_rows_among_short_ones_that_never_cease(
    other: int,
) -> None:
    """It needs all blocks but one. Shorter ones fit before it at all times, also while another long prompt is taken in."""
    scheduler = make(rows=4, blocks=5)
    names = iter(range(10_000))

    def keep_waiting() -> None:
        while len(scheduler.queues.waiting) < 3:
            add(scheduler, request(f"short {next(names)}", 30, new=40))

    for _ in range(100):
        keep_waiting()
        advance(scheduler)
    ahead = len(scheduler.queues.waiting) + 4 + scheduler.options.max_bypass  # who waits, who has a row, who may pass
    if other:
        add(scheduler, request("other", other, new=40))
    add(scheduler, request("long", 200, new=57))
    steps = 0
    while scheduler.queues.live["long"].slot is None:
        keep_waiting()
        advance(scheduler)
        steps += 1
        assert steps <= 40 * (ahead + bool(other))
    tokens = len(scheduler.queues.live["long"].output_token_ids)
    while tokens < 57:
        keep_waiting()
        step = next_step(scheduler)
        assert "long" not in {gone.request_id for gone in step.preempted}
        tokens += [name for name, *_ in commit(scheduler, step)].count("long")
