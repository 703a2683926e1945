# SPDX-License-Identifier: Apache-2.0
"""Snapshots of state beside vLLM's blocks, under vLLM's own scheduler: hits have both, and every row's state is that of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers import examples
from hypothesis import HealthCheck, example, given
from real_schedules import Served, check_all_is_free, play, workloads
from scheduler_outputs import random_prompt
from slot_model import answer
from vllm.config import VllmConfig
from vllm.v1.request import RequestStatus


LENGTH, BLOCK, CHUNK = 256, 64, 32
PREFIX = random_prompt(140, 99)
ASYNC = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
# Who starts alike finds blocks with a snapshot and without one; a crowd of others then takes either.
ALIKE: list[tuple[str, Any]] = [
    action
    for own in (3, 9, 40, 4)
    for action in (("add", (0, 130, own, 3, {})), ("step", 9), ("add", (1, 70, own, 30, {})))
]
# Artifacts and engine options, by what is special about them.
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one request's blocks, one place": ({"state_snapshots": 1}, {"async_scheduling": False}),
    "one request's blocks, async": ({}, {}),
    "two chunk rows, interval, async": (
        {"ctx_batch_size": 2, "kv_cache_tokens": 512, "state_snapshots": 3, "state_snapshot_interval": 65},
        {},
    ),
    "larger steps, async": ({"kv_cache_tokens": 384, "state_snapshot_interval": 64}, {"max_num_batched_tokens": 200}),
    "priorities": ({"kv_cache_tokens": 320}, {"scheduling_policy": "priority"}),
}


@pytest.fixture(scope="module")
def configure(configured: Callable[..., VllmConfig]) -> Callable[..., VllmConfig]:
    fixed = {"sequence_length": LENGTH, "prefill_chunk_size": CHUNK, "kv_block_size": BLOCK, "kv_cache_tokens": LENGTH}
    return lambda sizes, options: configured(fixed | sizes, options, stateful=True)


@pytest.fixture
def serve(configure: Callable[..., VllmConfig]) -> Callable[..., Served]:
    """Engines by sizes of the artifact, which has blocks for four requests unless they say otherwise."""
    return lambda asynchronous=False, **sizes: Served(
        configure({"kv_cache_tokens": 4 * LENGTH} | sizes, {"async_scheduling": asynchronous})
    )


def other(seed: int, length: int = 5) -> list[int]:
    return random_prompt(length, seed)


def ask(engine: Served, name: str, prompt: list[int], new_tokens: int = 2, **options: Any) -> int:
    """Serves a request to its end; the tokens that it did not compute."""
    engine.add(name, prompt, new_tokens, **options)
    engine.finish()
    return engine.hits.get(name, 0)


def chunks(engine: Served, name: str) -> list[int]:
    return [step[name] for step in engine.steps if name in step]


@pytest.mark.parametrize(("length", "same", "longer"), [(63, 0, 0), (64, 0, 64), (65, 64, 64), (128, 64, 128)])
def test_a_prompt_leaves_what_its_very_repetition_and_a_longer_one_can_go_on_behind(
    serve: Callable[..., Served], length: int, same: int, longer: int
) -> None:
    """The last token of a prompt is always computed."""
    engine = serve()
    ask(engine, "a", PREFIX[:length])
    assert ask(engine, "same", PREFIX[:length]) == same
    assert ask(engine, "longer", PREFIX[:length] + other(1)) == longer


def test_chunks_are_cut_at_borders_where_a_snapshot_is_due_and_nowhere_else(serve: Callable[..., Served]) -> None:
    engine = serve(prefill_chunk_size=96)
    ask(engine, "a", random_prompt(250, 1), 1)
    assert chunks(engine, "a") == [96, 96, 58]  # 192 is the last border
    ask(engine, "b", random_prompt(150, 2), 1)
    assert chunks(engine, "b") == [96, 32, 22]
    due = serve(prefill_chunk_size=96, state_snapshot_interval=65)
    ask(due, "a", random_prompt(250, 1), 1)
    assert chunks(due, "a") == [96, 32, 64, 58]  # the interval is two blocks
    assert ask(due, "b", random_prompt(250, 1)[:150] + other(1)) == 2 * BLOCK


@ASYNC
def test_who_parts_from_cached_blocks_leaves_a_snapshot_there(
    serve: Callable[..., Served], asynchronous: bool
) -> None:
    engine = serve(asynchronous, prefill_chunk_size=96)
    ask(engine, "a", random_prompt(250, 1))
    assert [ask(engine, f"r{own}", random_prompt(250, 1)[:100] + other(own, 90)) for own in (1, 2, 3)] == [0, 64, 64]
    assert chunks(engine, "r1")[:3] == [64, 64, 62]


def test_blocks_without_a_snapshot_are_computed_again(serve: Callable[..., Served]) -> None:
    """Two places, which other prompts take; the blocks of the first are still there."""
    engine = serve(state_snapshots=2)
    ask(engine, "a", PREFIX)
    for seed in (1, 2):
        ask(engine, f"r{seed}", random_prompt(70, seed))
    blocks = engine.scheduler.kv_cache_manager.get_computed_blocks(engine.add("again", PREFIX + other(1), 2))
    assert blocks[1] == 2 * BLOCK
    engine.finish()
    assert engine.hits == {} and chunks(engine, "again")[:5] == [32, 32, 32, 32, 17]
    assert ask(engine, "last", PREFIX + other(2)) == 2 * BLOCK  # which the one before left


def test_a_snapshot_without_its_blocks_is_no_hit_until_they_are_computed_again(serve: Callable[..., Served]) -> None:
    engine = serve(kv_cache_tokens=LENGTH)
    ask(engine, "a", PREFIX)
    ask(engine, "other", random_prompt(250, 1))  # all blocks that there are
    assert ask(engine, "again", PREFIX) == 0
    assert ask(engine, "last", PREFIX) == 2 * BLOCK


@ASYNC
def test_an_aborted_prompt_leaves_what_it_computed_whole(serve: Callable[..., Served], asynchronous: bool) -> None:
    engine = serve(asynchronous, state_snapshot_interval=64)
    engine.add("a", random_prompt(250, 1), 5)
    while len(engine.steps) < 3:
        engine.step()
    engine.abort("a")
    engine.run()
    assert ask(engine, "b", random_prompt(250, 1)) == BLOCK


def test_who_is_not_to_read_the_cache_computes_all_and_leaves_snapshots(serve: Callable[..., Served]) -> None:
    engine = serve()
    ask(engine, "a", PREFIX)
    assert ask(engine, "b", PREFIX, skip_reading_prefix_cache=True) == 0
    assert ask(engine, "c", random_prompt(70, 1), skip_reading_prefix_cache=True) == 0
    assert ask(engine, "d", random_prompt(70, 1)) == BLOCK


@ASYNC
def test_the_next_turn_of_a_session_leaves_snapshots_too(serve: Callable[..., Served], asynchronous: bool) -> None:
    engine = serve(asynchronous)
    session = engine.add("s", PREFIX[:40], 4, resumable=True)
    for _ in range(20):
        engine.step()
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    engine.turn("s", other(7, 60), 5)
    for _ in range(20):
        engine.step()
    text = list(session.all_token_ids)[:-5]
    assert list(session.all_token_ids) == text + answer(text, 5)
    engine.abort("s")
    engine.run()
    engine.add("b", text, 3)
    engine.run()
    assert engine.hits["b"] == BLOCK and list(engine.requests["b"].output_token_ids) == answer(text, 3)


def test_a_short_prompt_passes_a_long_one_though_a_cut_makes_two_steps_of_it(serve: Callable[..., Served]) -> None:
    engine = serve(prefill_chunk_size=96, kv_cache_tokens=8 * LENGTH)
    engine.add("long", random_prompt(250, 1), 1)
    engine.step()
    for seed in (2, 3):
        engine.add(f"short{seed}", random_prompt(90, seed), 1)
    engine.finish()
    assert engine.steps[:4] == [{"long": 96}, {"short2": 64}, {"short2": 26}, {"long": 96}]


@pytest.mark.parametrize(
    "name", [name if index < 3 else pytest.param(name, marks=pytest.mark.full) for index, name in enumerate(ENGINES)]
)
@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=workloads(shared=140, own=90, new_tokens=20, steps=20, aborted=12, most=9))
@example(actions=ALIKE)
def test_all_requests_get_their_tokens_whatever_is_restored_and_preempted(
    configure: Callable[..., VllmConfig], name: str, actions: list[tuple[str, Any]]
) -> None:
    engine = Served(configure(*ENGINES[name]))
    play(engine, actions)
    check_all_is_free(engine)
    assert not engine.scheduler._prefixes._prompts
