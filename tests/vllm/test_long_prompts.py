# SPDX-License-Identifier: Apache-2.0
"""Which prompts take the chunk rows of a step: who goes first, and that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from real_schedules import Served
from scheduler_outputs import random_prompt
from vllm.config import VllmConfig


SLOTS, LENGTH, CHUNK = 4, 96, 8
# By chunk rows and whether scheduling is asynchronous.
ENGINES = {"one row": (1, False), "one row, async": (1, True), "two rows": (2, False), "two rows, async": (2, True)}


@pytest.fixture(scope="module")
def serve(configured: Callable[..., VllmConfig]) -> Callable[..., Served]:
    """Engines over an artifact of 4 slots of 96 tokens and chunk rows of 8."""

    def start(name: str = "one row", **options: Any) -> Served:
        rows, asynchronous = ENGINES[name]
        sizes = {"sequence_length": LENGTH, "prefill_chunk_size": CHUNK, "ctx_batch_size": rows}
        how = {"async_scheduling": asynchronous, "enable_prefix_caching": False} | options
        return Served(configured(sizes, how))

    return start


def prompt_steps(engine: Served, name: str) -> list[int]:
    """Numbers of the steps, from 1, in which a prompt was taken in."""
    left, steps = len(engine.requests[name].prompt_token_ids or ()), []
    for number, step in enumerate(engine.steps, 1):
        if left > 0 and name in step:
            steps.append(number)
            left -= step[name]
    return steps


@pytest.mark.parametrize(
    ("name", "count", "at_once"), [("one row", 1, True), ("one row", 3, False), ("one row, async", 2, False)]
)
def test_a_short_prompt_behind_long_ones_has_its_first_token_by_the_second_step(
    serve: Callable[..., Served], name: str, count: int, at_once: bool
) -> None:
    engine = serve(name)
    longs = [f"long{index}" for index in range(count)]
    for index, long in enumerate(longs):
        engine.add(long, random_prompt(80, index), 2)
    if not at_once:
        engine.step()
    engine.add("short", random_prompt(CHUNK, 9), 2)
    engine.finish()
    assert prompt_steps(engine, "short") == [1 if at_once else 2]
    taken = [prompt_steps(engine, long) for long in longs]  # chunks of 8 of their 80 tokens
    assert [step for steps in taken for step in steps] == [
        step for step in range(1, 10 * count + 2) if step != (1 if at_once else 2)
    ]


def test_who_comes_while_a_step_of_a_long_prompt_runs_is_in_the_next_one(serve: Callable[..., Served]) -> None:
    """Asynchronous scheduling makes a step ahead of time, but none that such a request would have to wait for."""
    engine = serve("one row, async")
    engine.add("decodes", random_prompt(3, 7), 20)
    engine.add("long", random_prompt(80, 1), 2)
    while not prompt_steps(engine, "long"):
        engine.step()
    before = len(engine.steps)
    engine.step()  # the worker still has the long prompt's first chunk
    assert len(engine.steps) == before
    engine.add("short", random_prompt(CHUNK, 9), 2)
    engine.finish()
    assert prompt_steps(engine, "short") == [before + 1]
    # Every step of a prompt was done before the next one was made, and no other: then two are on their way.
    assert engine.most_in_flight == 2


@pytest.mark.parametrize("name", ["one row", "one row, async"])
def test_after_a_request_ended_decodes_go_first_so_that_a_following_short_prompt_need_not_wait_for_a_chunk(
    serve: Callable[..., Served], name: str
) -> None:
    engine = serve(name)
    engine.add("decodes", random_prompt(3, 7), 40)
    engine.add("ends", random_prompt(3, 8), 4)
    engine.add("long", random_prompt(80, 1), 2)
    while "ends" in engine.unfinished():
        engine.step()
    ended = len(engine.steps)
    assert prompt_steps(engine, "long")
    while len(engine.steps) == ended:
        engine.step()
    assert engine.steps[ended] == {"decodes": 1}
    engine.add("short", random_prompt(CHUNK, 9), 40)
    engine.finish()
    assert prompt_steps(engine, "short") == [ended + 2]
    # Nobody else ended since: the long prompt goes on in all other steps.
    steps = prompt_steps(engine, "long")
    assert [step for step in range(steps[0], steps[-1]) if step not in steps] == [ended + 1, ended + 2]


@pytest.mark.parametrize("name", ENGINES)
@examples(24, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(1, 5)), min_size=1, max_size=14))
def test_whoever_is_first_goes_on_in_every_third_step_and_all_decode_in_every_step(
    serve: Callable[..., Served], name: str, arrivals: list[tuple[int, int, int]]
) -> None:
    engine = serve(name)
    for number, (steps, length, new_tokens) in enumerate(arrivals):
        for _ in range(steps):
            engine.step()
        engine.add(f"r{number}", random_prompt(length, number), new_tokens)
    engine.finish()
    assert all(len(runs) == 1 for runs in engine.runs)
    check_progress(engine)


def check_progress(engine: Served) -> None:
    """Follows all prompts through the steps: what is left of each, and who waits for the first step in a row."""
    left = {name: len(request.prompt_token_ids or ()) for name, request in engine.requests.items()}
    tokens = {name: len(request.output_token_ids) for name, request in engine.requests.items()}
    waits: dict[str, int] = {}
    for step in engine.steps:
        for name, count in tokens.items():
            if left[name] <= 0 and count > 0:
                assert step.get(name) == 1, f"{name} did not decode"
        begun = [name for name in left if 0 < left[name] < len(engine.requests[name].prompt_token_ids or ())]
        for name in begun:
            waits[name] = 0 if name in step else waits.get(name, 0) + 1
        assert not begun or waits[begun[0]] <= 2, f"{begun[0]} waits for the third step in a row"
        for name, count in step.items():
            left[name] -= count if left[name] > 0 else 0
            tokens[name] -= left[name] <= 0
    assert not any(left.values()) and not any(tokens.values())


@pytest.mark.parametrize("name", ENGINES)
def test_who_waits_for_a_slot_waits_in_vllms_order_and_for_capacity(serve: Callable[..., Served], name: str) -> None:
    engine = serve(name)
    names = [f"r{number}" for number in range(16)]
    for number, each in enumerate(names):
        engine.add(each, random_prompt(4 + number, number), 6)
    while engine.scheduler.has_requests():
        engine.step()
        assert not engine.scheduler.deferred_waiting
        waiting = [request.request_id for request in engine.scheduler.waiting]
        assert waiting == [each for each in names if each in waiting]
        assert len(engine.scheduler.waiting) == len(waiting) == engine.scheduler.get_request_counts()[1]
    assert list(engine.first_steps()) == names
    engine.check_answers()


@pytest.mark.parametrize(
    ("name", "options", "first", "others", "steps"),
    [
        # 4 tokens are left, and no row; then c passes b
        ("one row", {}, [("a", 12)], [("b", 20), ("c", 3)], [{"a": 8}, {"a": 4}, {"a": 1, "c": 3}, {"a": 1, "c": 1, "b": 8}]),
        # c leaves a one of the two rows; after a's tail of 4 tokens there is one row for b, whatever number of tokens is left
        ("two rows", {}, [("a", 20), ("b", 20), ("c", 7)], [], [{"a": 8, "c": 7}, {"a": 12, "c": 1}, {"a": 1, "c": 1, "b": 16}]),
        # more urgent ones take the rows of one that has begun
        ("one row", {"scheduling_policy": "priority"}, [("z", 40)], [("b", 24)],
         [{"z": 8}, *[{"b": 8}] * 3, {"b": 1, "z": 8}]),
    ],
    ids=["a tail leaves no row", "a prompt needs more rows than are left", "priorities"],
)  # fmt: skip
def test_rows_go_to_whole_prompts_that_fit_them_and_by_priority(
    serve: Callable[..., Served],
    name: str,
    options: dict[str, str],
    first: Any,
    others: Any,
    steps: list[dict[str, int]],
) -> None:
    engine = serve(name, **options)
    for arrivals in (first, others):
        for request, length in arrivals:
            engine.add(request, random_prompt(length, ord(request)), 8, priority=ord(request))
        engine.step()
    engine.finish()
    assert engine.steps[: len(steps)] == steps
    assert all(len(runs) <= 1 for runs in engine.runs)


def test_a_prompt_goes_on_beside_one_that_vllm_does_not_start(serve: Callable[..., Served]) -> None:
    engine = serve(scheduling_policy="priority")
    engine.add("begun", random_prompt(40, 1), 2, priority=5)
    engine.step()
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    manager.allocate_slots = lambda request, *rest, **named: (
        None if request.request_id == "urgent" else allocate(request, *rest, **named)
    )
    engine.add("urgent", random_prompt(24, 2), 2, priority=1)
    for _ in range(9):
        engine.step()
    assert engine.unfinished() == ["urgent"]
    manager.allocate_slots = allocate
    engine.finish()
