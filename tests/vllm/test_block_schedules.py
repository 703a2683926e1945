# SPDX-License-Identifier: Apache-2.0
"""vLLM's own block manager over an artifact of blocks: prefixes by reference, preemption where blocks run out, rows of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers import examples
from hypothesis import HealthCheck, given
from real_schedules import Served, check_all_is_free, play, workloads
from scheduler_outputs import random_prompt
from vllm.config import VllmConfig


LENGTH, BLOCK, CHUNK, ROWS = 256, 64, 32, 4
PREFIX = random_prompt(140, 99)
ASYNC = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
# Artifacts and engine options, by what is special about them.
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one request's blocks": ({}, {"async_scheduling": False}),
    "one request's blocks, async": ({}, {}),
    "two chunk rows, async": ({"ctx_batch_size": 2, "kv_cache_tokens": 384}, {}),
    "larger steps, async": ({"kv_cache_tokens": 384}, {"max_num_batched_tokens": 200}),
    "priorities": ({"kv_cache_tokens": 320}, {"scheduling_policy": "priority"}),
    "nothing reused": ({"kv_cache_tokens": 384}, {"enable_prefix_caching": False}),
    "two requests at a time": ({"kv_cache_tokens": 320}, {"max_num_seqs": 2}),
}


@pytest.fixture(scope="module")
def configure(configured: Callable[..., VllmConfig]) -> Callable[..., VllmConfig]:
    fixed = {"sequence_length": LENGTH, "prefill_chunk_size": CHUNK, "kv_block_size": BLOCK, "kv_cache_tokens": LENGTH}
    return lambda sizes, options: configured(fixed | sizes, options)


@pytest.fixture
def serve(configure: Callable[..., VllmConfig]) -> Callable[..., Served]:
    """Engines by tokens of the cache and vLLM's options."""
    return lambda tokens=4 * LENGTH, **options: Served(configure({"kv_cache_tokens": tokens}, options))


@ASYNC
def test_whole_blocks_of_a_prefix_are_shared_with_who_runs_and_who_ran(
    serve: Callable[..., Served], asynchronous: bool
) -> None:
    engine = serve(async_scheduling=asynchronous)
    engine.add("a", PREFIX, 60)
    while not engine.requests["a"].output_token_ids:
        engine.step()
    engine.add("beside", PREFIX + random_prompt(5, 1), 3)
    while not engine.requests["beside"].output_token_ids:
        engine.step()
    tables = engine.worker.runner.tables
    assert tables is not None and tables.blocks[0, :2].tolist() == tables.blocks[1, :2].tolist()
    assert tables.blocks[0, 2] != tables.blocks[1, 2]
    engine.run()
    engine.add("after", list(engine.requests["a"].all_token_ids)[:195] + random_prompt(5, 2), 3)
    engine.finish()
    assert engine.hits == {"beside": 2 * BLOCK, "after": 3 * BLOCK}
    check_all_is_free(engine)


def test_a_prompt_of_the_same_step_shares_what_that_step_writes(configure: Callable[..., VllmConfig]) -> None:
    engine = Served(
        configure({"kv_cache_tokens": 512, "prefill_chunk_size": 64, "ctx_batch_size": 3}, {"async_scheduling": False})
    )
    engine.add("a", PREFIX[:100], 5)
    engine.add("b", PREFIX[:64] + random_prompt(5, 1), 5)
    engine.finish()
    assert engine.reused[0] == {"b": BLOCK} and set(engine.steps[0]) == {"a", "b"}


def test_a_preempted_request_begins_with_the_blocks_that_nobody_took(serve: Callable[..., Served]) -> None:
    engine = serve(tokens=LENGTH)
    engine.add("first", random_prompt(110, 1), 40)
    engine.add("last", random_prompt(110, 2), 60)
    engine.finish()
    assert engine.requests["last"].num_preemptions == 1
    assert engine.hits == {"last": BLOCK}


@ASYNC
def test_blocks_that_a_prompt_under_way_needs_are_given_to_no_other_prompt(
    configure: Callable[..., VllmConfig], asynchronous: bool
) -> None:
    options = {"async_scheduling": asynchronous, "long_prefill_token_threshold": CHUNK}
    engine = Served(configure({"kv_cache_tokens": 384, "ctx_batch_size": 2}, options))
    engine.add("long", random_prompt(200, 1), 3)  # 4 of 6 blocks, taken in chunk by chunk
    engine.step()
    engine.add("other", random_prompt(180, 2), 3)  # 3 blocks
    engine.add("short", random_prompt(20, 3), 3)
    engine.finish()
    chunks = [number for number, step in enumerate(engine.steps) if step.get("long", 0) > 1]
    assert min(number for number, step in enumerate(engine.steps) if "other" in step) > chunks[-1]
    assert list(engine.first_steps()) == ["long", "other", "short"]
    assert not any(request.num_preemptions for request in engine.requests.values())


@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
@pytest.mark.parametrize("name", ENGINES)
@examples(4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=workloads(shared=140, own=90, new_tokens=60, steps=20, aborted=20, most=16))
def test_all_requests_get_their_tokens_whatever_is_shared_and_preempted(
    configure: Callable[..., VllmConfig], name: str, ahead: bool, actions: list[tuple[str, Any]]
) -> None:
    engine = Served(configure(*ENGINES[name]), ahead=ahead)
    play(engine, actions)
    check_all_is_free(engine)
