# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse between slots: the connector under vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from real_schedules import Served
from scheduler_outputs import random_prompt
from slot_model import answer
from vllm.config import VllmConfig
from vllm.v1.request import RequestStatus


SIZES: dict[str, Any] = {"sequence_length": 96, "prefill_chunk_size": 8}
PREFIX = random_prompt(40, 99)
ASYNC = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture
def serve(configured: Callable[..., VllmConfig]) -> Callable[..., Served]:
    """Engines over an artifact of 4 slots of 96 tokens and `rows` chunk rows of 8."""
    return lambda rows=1, **options: Served(configured(SIZES | {"ctx_batch_size": rows}, options))


def other(seed: int, length: int = 5) -> list[int]:
    return random_prompt(length, seed)


@ASYNC
def test_what_a_finished_request_computed_is_reused_but_for_the_last_prompt_token(
    serve: Callable[..., Served], asynchronous: bool
) -> None:
    engine = serve(async_scheduling=asynchronous)
    first = engine.add("a", PREFIX, 6)
    engine.run()
    everything = list(first.all_token_ids)
    engine.add("longer", everything + other(1), 3)
    engine.run()
    engine.add("same", PREFIX, 3)
    engine.finish()
    # The token that a request ends with is known but was never computed, unless the next step had begun already.
    assert engine.hits == {"longer": len(everything) - 1, "same": len(PREFIX) - 1}


@ASYNC
def test_what_a_running_request_has_computed_is_reused_and_nothing_of_the_present_step(
    serve: Callable[..., Served], asynchronous: bool
) -> None:
    engine = serve(rows=2, max_num_batched_tokens=64, async_scheduling=asynchronous, long_prefill_token_threshold=24)
    engine.add("a", PREFIX, 20)
    engine.add("b", PREFIX + other(1), 3)  # admitted in the very step that computes a's first tokens
    engine.step()
    engine.add("c", PREFIX + other(2), 3)  # a has computed 24 tokens, and computes 16 more in the step that admits c
    engine.finish()
    assert engine.reused[0] == {}
    assert engine.reused[1] == {"c": 24}


@ASYNC
def test_a_session_takes_turns_in_its_slot(serve: Callable[..., Served], asynchronous: bool) -> None:
    """vLLM keeps the block of a session that waits for more input, and drops the last token of each turn."""
    engine = serve(async_scheduling=asynchronous)
    session = engine.add("s", PREFIX, 4, resumable=True)
    others = [engine.add(f"r{index}", PREFIX + other(index), 9) for index in range(5)]
    while session.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        engine.step()
    before = list(session.all_token_ids)
    assert before == PREFIX + answer(PREFIX, 4)
    engine.turn("s", other(7), 5)
    for _ in range(100):
        engine.step()
    second = before[:-1] + other(7)
    assert list(session.all_token_ids) == second + answer(second, 5)
    engine.abort("s")
    engine.run()
    for request in others:
        assert list(request.output_token_ids) == answer(request.prompt_token_ids, 9)


@ASYNC
@pytest.mark.parametrize("blocks", [{}, {"kv_block_size": 64, "sequence_length": 128}], ids=["slots", "blocks"])
def test_a_session_that_stops_goes_on_with_the_state_of_what_it_keeps(
    configured: Callable[..., VllmConfig], blocks: dict[str, int], asynchronous: bool
) -> None:
    """A step that was on its way when the turn ended has taken a token more into the slot's state than vLLM keeps."""
    engine = Served(configured(SIZES | blocks, {"async_scheduling": asynchronous}, stateful=True))
    beside = engine.add("beside", other(1), 40)
    answered = answer(PREFIX, 4)
    session = engine.add("s", PREFIX, 20, resumable=True, stop_token_ids=[answered[-1]])
    for _ in range(20):
        engine.step()
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    kept = [*PREFIX, *answered][: session.num_computed_tokens]
    engine.turn("s", other(7), 5)
    for _ in range(40):
        engine.step()
    assert list(session.all_token_ids) == kept + other(7) + answer(kept + other(7), 5)
    assert list(beside.output_token_ids) == answer(other(1), 40)
    engine.abort("s")
    engine.run()


@pytest.mark.parametrize(("interval", "reused"), [(None, {}), (16, {"b": 16}), (20, {"b": 24})])
def test_of_a_long_prompt_that_is_aborted_snapshots_are_left_every_so_many_tokens(
    configured: Callable[..., VllmConfig], interval: int | None, reused: dict[str, int]
) -> None:
    sizes = SIZES | {"state_snapshot_interval": interval}
    engine = Served(configured(sizes, {"async_scheduling": False}, stateful=True))
    engine.add("a", PREFIX, 5)
    for _ in range(3):
        engine.step()
    engine.abort("a")
    engine.add("b", PREFIX[:24] + other(1), 5)
    engine.run()
    assert list(engine.requests["b"].output_token_ids) == answer(PREFIX[:24] + other(1), 5)
    assert engine.hits == reused


def test_nothing_is_reused_of_what_is_forgotten_or_where_it_is_declined(serve: Callable[..., Served]) -> None:
    for options in ({}, {"enable_prefix_caching": False}):
        engine = serve(**options)
        engine.add("a", PREFIX, 2)
        engine.run()
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.add("b", PREFIX, 2)
        engine.run()
        engine.add("c", PREFIX, 2, skip_reading_prefix_cache=True)
        engine.run()
        assert not any(engine.reused)
        engine.add("d", PREFIX, 2)
        engine.run()
        assert ({"d": len(PREFIX) - 1} in engine.reused) is not bool(options)
        engine.check_answers()
