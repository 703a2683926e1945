# SPDX-License-Identifier: Apache-2.0
"""Which prompts take the chunk rows of a step: our scheduler, which is vLLM's, over a worker that runs what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_schedules import Served
from scheduler_outputs import random_prompt
from vllm.engine.arg_utils import EngineArgs


@pytest.fixture
def serve(export_text: Callable[..., Path]) -> Callable[..., Served]:
    """Engines over an artifact of 4 slots of 96 tokens and a chunk row of 8; `rows` is how many chunk rows it has."""

    def start(rows: int = 1, **options: Any) -> Served:
        artifact = export_text(sequence_length=96, prefill_chunk_size=8, ctx_batch_size=rows)
        return Served(EngineArgs(model=str(artifact), **options).create_engine_config())

    return start


def other(seed: int, length: int = 5) -> list[int]:
    return random_prompt(length, seed)


def test_a_prompt_waits_where_the_tail_of_another_leaves_room_but_no_row(serve: Callable[..., Served]) -> None:
    engine = serve()
    engine.add("a", other(1, 12), 8)
    engine.step()
    engine.add("b", other(2, 20), 8)
    engine.add("c", other(3, 3), 8)
    engine.run()
    engine.check_answers()
    assert engine.steps[:6] == [
        {"a": 8},
        {"a": 4},  # 4 tokens are left, and no row
        {"a": 1, "c": 3},  # passes b
        {"a": 1, "c": 1, "b": 8},
        {"a": 1, "c": 1, "b": 8},
        {"a": 1, "c": 1, "b": 4},
    ]
    assert all(len(runs) <= 1 for runs in engine.runs)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_chunk_rows_are_full_whatever_else_decodes(serve: Callable[..., Served], asynchronous: bool) -> None:
    engine = serve(async_scheduling=asynchronous)
    engine.add("long", other(1, 60), 2)
    for name, tokens in (("a", 20), ("b", 13)):
        engine.add(name, other(len(name) + tokens, 3), tokens)
    engine.add("behind", other(9, 50), 2)
    engine.run()
    engine.check_answers()
    chunks = [count for step in engine.steps for name, count in step.items() if name == "long" and count > 1]
    assert chunks == [8] * 7 + [4]  # alone
    chunks = [count for step in engine.steps for name, count in step.items() if name == "behind" and count > 1]
    assert chunks == [8] * 6 + [2]  # beside decodes
    assert all(len(runs) <= 1 for runs in engine.runs)


def test_prompts_that_fit_the_rows_which_are_left_are_taken_in_together(serve: Callable[..., Served]) -> None:
    engine = serve(rows=2)
    engine.add("a", other(1, 12), 4)
    engine.add("b", other(2, 3), 4)
    engine.add("c", other(3, 7), 4)
    engine.add("d", other(4, 6), 4)
    engine.run()
    engine.check_answers()
    assert engine.steps[:3] == [{"a": 12}, {"a": 1, "b": 3, "c": 7}, {"a": 1, "b": 1, "c": 1, "d": 6}]
    assert all(len(runs) <= 1 for runs in engine.runs)


def test_a_prompt_that_needs_more_rows_than_are_left_waits_and_a_shorter_one_goes_first(
    serve: Callable[..., Served],
) -> None:
    engine = serve(rows=2)
    engine.add("a", other(1, 20), 4)
    engine.add("b", other(2, 20), 4)
    engine.add("c", other(3, 7), 4)
    engine.run()
    engine.check_answers()
    # c leaves a one of the two rows; after a's tail of 4 tokens there is one row for b, whatever number of tokens is left.
    assert engine.steps[:3] == [{"a": 8, "c": 7}, {"a": 12, "c": 1}, {"a": 1, "c": 1, "b": 16}]
    assert all(len(runs) <= 1 for runs in engine.runs)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_prompts_of_one_step_that_end_in_it_pass_a_long_one_in_two_of_three_steps_at_most(
    serve: Callable[..., Served], asynchronous: bool
) -> None:
    engine = serve(async_scheduling=asynchronous)
    engine.add("long", other(1, 60), 2)
    engine.step()
    for index in range(8):
        engine.add(f"s{index}", other(index + 2, 8), 1)
    engine.run()
    engine.check_answers()
    prompts = [name for step in engine.steps for name, count in step.items() if count > 1]
    passing = [name for index in range(0, 8, 2) for name in (f"s{index}", f"s{index + 1}", "long")]
    assert prompts == ["long", *passing, "long", "long", "long"]
    assert all(len(runs) <= 1 for runs in engine.runs)


def test_a_prompt_of_several_steps_passes_nobody(serve: Callable[..., Served]) -> None:
    engine = serve()
    engine.add("long", other(1, 60), 2)
    engine.step()
    engine.add("b", other(2, 9), 2)
    engine.add("c", other(3, 2), 2)
    engine.run()
    engine.check_answers()
    assert list(engine.first_steps()) == ["long", "c", "b"]


def test_nobody_passes_where_all_slots_are_taken_or_priorities_forbid(serve: Callable[..., Served]) -> None:
    for options in ({"max_num_seqs": 1}, {"scheduling_policy": "priority"}):
        engine = serve(**options)
        engine.add("long", other(1, 60), 2)
        engine.step()
        engine.add("short", other(2, 3), 2, priority=1)
        engine.run()
        engine.check_answers()
        steps = [step for step in engine.steps if step.get("long", 0) > 1]
        assert len(steps) == 8 and all("short" not in step for step in steps), options


def test_prompts_that_are_held_back_keep_their_order(serve: Callable[..., Served]) -> None:
    engine = serve()
    names = [f"r{index}" for index in range(12)]
    for index, name in enumerate(names):
        engine.add(name, other(index, 3 + 8 * (index % 3)), 2)
    engine.run()
    engine.check_answers()
    first = list(engine.first_steps())
    for length in range(3):  # prompts of one step pass those of two and three, and nobody else passes anybody
        assert [name for name in first if int(name[1:]) % 3 == length] == names[length::3]
    assert [name for name in first if int(name[1:]) % 3] == [name for name in names if int(name[1:]) % 3]


def test_a_larger_budget_holds_no_prompt_back(serve: Callable[..., Served]) -> None:
    engine = serve(max_num_batched_tokens=64)
    for index in range(4):
        engine.add(f"r{index}", other(index, 12), 2)
    engine.step()
    assert engine.steps == [{f"r{index}": 12 for index in range(4)}]
    assert len(engine.runs[0]) == 8
    engine.run()
    engine.check_answers()


def test_priorities_decide_who_is_next(serve: Callable[..., Served]) -> None:
    engine = serve(scheduling_policy="priority")
    for index in range(6):
        engine.add(f"r{index}", other(index, 8), 2, priority=-index)
    engine.run()
    engine.check_answers()
    assert list(engine.first_steps()) == ["r5", "r4", "r3", "r2", "r1", "r0"]


def test_a_more_urgent_long_prompt_takes_the_rows_of_one_that_has_begun(serve: Callable[..., Served]) -> None:
    engine = serve(scheduling_policy="priority", async_scheduling=False)
    engine.add("begun", other(1, 40), 2, priority=5)
    engine.step()
    engine.add("urgent", other(2, 24), 2, priority=1)
    engine.run()
    engine.check_answers()
    assert engine.steps[:5] == [{"begun": 8}, *[{"urgent": 8}] * 3, {"urgent": 1, "begun": 8}]


def test_a_prompt_goes_on_beside_one_that_vllm_does_not_start(serve: Callable[..., Served]) -> None:
    engine = serve(scheduling_policy="priority", async_scheduling=False)
    engine.add("begun", other(1, 40), 2, priority=5)
    engine.step()
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    manager.allocate_slots = lambda request, *rest, **named: (
        None if request.request_id == "urgent" else allocate(request, *rest, **named)
    )
    engine.add("urgent", other(2, 24), 2, priority=1)
    for _ in range(9):
        engine.step()
    assert engine.unfinished() == ["urgent"]
    manager.allocate_slots = allocate
    engine.run()
    engine.check_answers()
