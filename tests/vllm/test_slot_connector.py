# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse between slots: the connector under vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_schedules import Served
from scheduler_outputs import random_prompt
from slot_model import answer
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.request import RequestStatus

from optimum_neuron import NeuronConfig, export_model
from optimum_neuron.engine.block_pool import MIN_REUSE


CHUNK, LENGTH = 8, 96
PREFIX = random_prompt(40, 99)
ASYNC = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture
def serve(export_text: Callable[..., Path]) -> Callable[..., Served]:
    """Engines over an artifact of 4 slots of 96 tokens and a chunk row of 8; `rows` is how many chunk rows it has."""

    def start(rows: int = 1, **options: Any) -> Served:
        artifact = export_text(sequence_length=LENGTH, prefill_chunk_size=CHUNK, ctx_batch_size=rows)
        return Served(EngineArgs(model=str(artifact), **options).create_engine_config())

    return start


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
    engine.run()
    engine.check_answers()
    reused = {name: length for step in engine.reused for name, length in step.items()}
    # The token that a request ends with is known but was never computed, unless the next step had begun already.
    assert reused == {"longer": len(everything) - 1, "same": len(PREFIX) - 1}


@ASYNC
def test_what_a_running_request_has_computed_is_reused_and_nothing_of_the_present_step(
    serve: Callable[..., Served], asynchronous: bool
) -> None:
    engine = serve(rows=2, max_num_batched_tokens=64, async_scheduling=asynchronous, long_prefill_token_threshold=24)
    engine.add("a", PREFIX, 20)
    engine.add("b", PREFIX + other(1), 3)  # admitted in the very step that computes a's first tokens
    engine.step()
    engine.add("c", PREFIX + other(2), 3)  # a has computed 24 tokens, and computes 16 more in the step that admits c
    engine.run()
    engine.check_answers()
    assert engine.reused[0] == {}
    assert engine.reused[1] == {"c": 24}


@ASYNC
def test_what_an_aborted_request_computed_is_reused(serve: Callable[..., Served], asynchronous: bool) -> None:
    engine = serve(async_scheduling=asynchronous)
    engine.add("a", PREFIX, 20)
    for _ in range(4):
        engine.step()
    engine.abort("a")
    computed = sum(counts.get("a", 0) for counts in engine.steps)
    engine.add("b", PREFIX + other(1), 3)
    engine.run()
    engine.check_answers()
    assert 0 < computed < len(PREFIX)
    assert {"b": computed} in engine.reused


def test_requests_of_one_step_copy_from_the_copies_of_each_other(serve: Callable[..., Served]) -> None:
    """All four slots change hands at once: sources are overwritten in the step that copies from them."""
    engine = serve(max_num_batched_tokens=256)
    for name in "wxyz":
        engine.add(name, (PREFIX if name == "y" else []) + other(ord(name), 20), 2)
    engine.run()
    for index, name in enumerate("abcd"):
        engine.add(name, PREFIX + other(index), 3)
    engine.run()
    engine.check_answers()
    assert {name: len(PREFIX) for name in "abcd"} in engine.reused


@ASYNC
def test_all_slots_change_hands_in_every_step(serve: Callable[..., Served], asynchronous: bool) -> None:
    engine = serve(max_num_batched_tokens=512, async_scheduling=asynchronous)
    for index in range(40):
        engine.add(f"r{index}", PREFIX[: 17 + index % 24] + other(index % 7, index % 5 + 1), 1 + index % 2)
    engine.run()
    engine.check_answers()
    assert sum(map(len, engine.reused)) >= 36


@ASYNC
def test_prefixes_outlive_their_requests_in_all_slots_and_the_one_unused_for_longest_makes_room(
    serve: Callable[..., Served], asynchronous: bool
) -> None:
    engine = serve(async_scheduling=asynchronous)
    topics = [random_prompt(30, seed) for seed in range(5)]

    def ask(number: int, topic: int) -> int:
        engine.add(f"{number}", topics[topic] + other(number), 2)
        engine.run()
        return max(step.get(f"{number}", 0) for step in engine.reused)

    # Four slots remember four topics, and a fifth takes the place of the first.
    asked = [0, 1, 2, 3, 4, 1, 2, 3, 4, 0]
    assert [ask(number, topic) for number, topic in enumerate(asked)] == [0, 0, 0, 0, 0, 30, 30, 30, 30, 0]
    engine.check_answers()


def test_a_conversation_goes_on_in_its_own_slot(serve: Callable[..., Served]) -> None:
    engine = serve()
    talks = {name: random_prompt(20, seed) for seed, name in enumerate("wxyz")}
    slots: dict[str, int] = {}
    for turn, order in enumerate(("wxyz", "zxyw", "yzwx")):
        for name in order:
            request = engine.add(f"{name}{turn}", talks[name], 3)
            before = len(engine.reused)
            engine.run()
            slot = engine.slot_of[f"{name}{turn}"]
            assert slots.setdefault(name, slot) == slot
            assert engine.reused[before] == ({f"{name}{turn}": len(talks[name]) - 6} if turn else {})
            talks[name] = list(request.all_token_ids) + other(turn)
    assert sorted(slots.values()) == [0, 1, 2, 3]
    engine.check_answers()


def test_a_common_prefix_below_the_minimum_is_computed(serve: Callable[..., Served]) -> None:
    engine = serve()
    engine.add("a", PREFIX, 2)
    engine.run()
    engine.add("short", PREFIX[: MIN_REUSE - 1] + other(1), 2)
    engine.run()
    assert not any(engine.reused)
    engine.add("enough", PREFIX[:MIN_REUSE] + other(2), 2)
    engine.run()
    assert {"enough": MIN_REUSE} in engine.reused
    engine.check_answers()


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
    tiny_checkpoints: dict[str, Path], tmp_path: Path, blocks: dict[str, int], asynchronous: bool
) -> None:
    """A step that was on its way when the turn ended has taken a token more into the slot's state than vLLM keeps."""
    sizes = {"batch_size": 4, "sequence_length": LENGTH, "prefill_chunk_size": CHUNK, "target": "eager"} | blocks
    artifact = export_model(tiny_checkpoints["lfm2"], tmp_path / "lfm2", config=NeuronConfig(**sizes))
    engine = Served(EngineArgs(model=str(artifact), async_scheduling=asynchronous).create_engine_config())
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
    tiny_checkpoints: dict[str, Path], tmp_path: Path, interval: int | None, reused: dict[str, int]
) -> None:
    sizes = {"batch_size": 4, "sequence_length": LENGTH, "prefill_chunk_size": CHUNK, "target": "eager"}
    config = NeuronConfig(**sizes, state_snapshot_interval=interval)
    artifact = export_model(tiny_checkpoints["lfm2"], tmp_path / "lfm2", config=config)
    engine = Served(EngineArgs(model=str(artifact), async_scheduling=False).create_engine_config())
    engine.add("a", PREFIX, 5)
    for _ in range(3):
        engine.step()
    engine.abort("a")
    engine.add("b", PREFIX[:24] + other(1), 5)
    engine.run()
    assert list(engine.requests["b"].output_token_ids) == answer(PREFIX[:24] + other(1), 5)
    assert {name: length for step in engine.reused for name, length in step.items()} == reused


@ASYNC
@pytest.mark.parametrize("forget", [False, True], ids=["contents kept", "contents forgotten"])
def test_requests_preempted_by_a_reset_come_back_exact(
    serve: Callable[..., Served], forget: bool, asynchronous: bool
) -> None:
    engine = serve(async_scheduling=asynchronous)
    for index in range(5):
        engine.add(f"r{index}", PREFIX[: 20 + index] + other(index), 12)
    preempted = set()
    for step in range(120):
        engine.step()
        if step % 14 == 5:
            running = [request.request_id for request in engine.scheduler.running]
            engine.reset(forget)
            preempted.update(running)
    engine.run()
    engine.check_answers()
    assert len(preempted) == 5
    assert all(request.num_preemptions for name, request in engine.requests.items() if name in preempted)


def test_rows_that_a_preempted_request_left_are_not_taken_for_those_it_computes_elsewhere(
    serve: Callable[..., Served],
) -> None:
    engine = serve()
    engine.add("twin", PREFIX, 8)
    engine.run()
    for index in range(2):
        engine.add(f"other{index}", other(index), 1)
        engine.run()
    request = engine.add("a", PREFIX, 30)  # says what its twin said, and more
    while len(request.output_token_ids) < 4:
        engine.step()
    left = engine.slot_of["a"]
    engine.reset(forget=False)
    engine.run()
    assert engine.slot_of["a"] != left
    said = list(request.all_token_ids)[:60]
    engine.add("b", said + other(3), 2)
    engine.run()
    engine.check_answers()
    assert {"b": 60} in engine.reused


def test_a_forgotten_prefix_is_computed_again(serve: Callable[..., Served]) -> None:
    engine = serve()
    engine.add("a", PREFIX, 2)
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.add("b", PREFIX, 2)
    engine.run()
    assert not any(engine.reused)
    engine.check_answers()


def test_prefix_caching_can_be_turned_off(serve: Callable[..., Served]) -> None:
    engine = serve(enable_prefix_caching=False)
    for name in "ab":
        engine.add(name, PREFIX, 2)
        engine.run()
    assert not any(engine.reused)
    engine.check_answers()


def test_a_request_may_decline_to_reuse(serve: Callable[..., Served]) -> None:
    engine = serve()
    engine.add("a", PREFIX, 2)
    engine.run()
    engine.add("b", PREFIX, 2, skip_reading_prefix_cache=True)
    engine.run()
    assert not any(engine.reused)
    engine.add("c", PREFIX, 2)
    engine.run()
    assert {"c": len(PREFIX) - 1} in engine.reused
    engine.check_answers()
