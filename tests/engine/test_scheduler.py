# SPDX-License-Identifier: Apache-2.0
"""What the scheduler puts into a step, case by case; test_scheduler_fuzz.py proves it for random workloads."""

from __future__ import annotations

import pytest
from scheduling import TOKEN, add, advance, counts, make, next_step, request, with_decodes

from optimum_neuron.engine.queues import RequestState


def test_an_unfinished_prompt_cannot_take_a_token() -> None:
    state = RequestState(request("a", 3), 0, 5)
    state.computed = 2
    with pytest.raises(RuntimeError, match="1 prompt tokens left"):
        state.append_token(TOKEN)


def test_the_decodes_are_built_again_only_when_the_running_requests_change() -> None:
    scheduler = with_decodes(2)
    first = next_step(scheduler).decodes
    advance(scheduler)
    assert next_step(scheduler).decodes is first
    scheduler.abort_request("d0")
    assert [decode.request_id for decode in next_step(scheduler).decodes] == ["d1"]


# Rows, budgets, thresholds, alignment


@pytest.mark.parametrize(
    ("decodes", "prompts", "budget", "expected"),
    [
        (0, [8000], 2048, {"p0": 2048}),
        (2, [8000], 2048, {"p0": 2046}),
        (1, [100], 2048, {"p0": 100}),
        (1, [8000, 8000], 2048, {"p0": 2047}),
        (3, [], 2048, {}),
        (3, [8000], 5, {"p0": 2}),
        (0, [100, 8000], 2048, {"p0": 100, "p1": 1948}),
        (0, [100, 50, 8000], 2048, {"p0": 100, "p1": 50}),
    ],
)
def test_the_budget_serves_decodes_first_and_prompts_in_order(
    decodes: int, prompts: list[int], budget: int, expected: dict[str, int]
) -> None:
    scheduler = with_decodes(decodes, rows=2, chunk=2048, length=9000, max_step_tokens=budget, max_bypass=0)
    add(scheduler, *(request(f"p{index}", length) for index, length in enumerate(prompts)))
    step = next_step(scheduler)
    assert (len(step.decodes), counts(step)) == (decodes, expected)


@pytest.mark.parametrize(
    ("prompts", "options", "expected"),
    [
        ([20], {"long_prefill_token_threshold": 8}, [8]),
        ([20, 20], {"long_prefill_token_threshold": 8}, [8, 8]),
        ([20, 20], {"long_prefill_token_threshold": 8, "max_step_tokens": 10}, [8, 2]),
        ([20], {}, [20]),
        ([5, 20], {"long_prefill_token_threshold": 8}, [5, 8]),
    ],
)
def test_a_threshold_limits_each_prompt_of_a_step(
    prompts: list[int], options: dict[str, int], expected: list[int]
) -> None:
    scheduler = make(chunk=32, rows=2, **options)
    add(scheduler, *(request(f"p{index}", length) for index, length in enumerate(prompts)))
    assert list(counts(next_step(scheduler)).values()) == expected


@pytest.mark.parametrize(
    ("prompt", "budget", "alignment", "expected"),
    [
        (100, None, 1, [32, 32, 32, 4]),
        (100, 30, 8, [24, 24, 24, 28]),
        (100, 30, 16, [16, 16, 16, 16, 16, 20]),
        (20, 6, 16, [6, 6, 4, 4]),
        (20, None, 16, [20]),
        (33, 32, 16, [32, 1]),
    ],
)
def test_only_a_truncated_chunk_is_aligned_and_never_to_zero(
    prompt: int, budget: int | None, alignment: int, expected: list[int]
) -> None:
    scheduler = make(slots=4, chunk=32, max_step_tokens=budget, chunk_alignment=alignment)
    add(scheduler, request("a", prompt))
    taken = []
    while scheduler.queues.waiting or scheduler.queues.prefilling:
        taken.append(next_step(scheduler).pieces[0].count)
        advance(scheduler)
    assert taken == expected


@pytest.mark.parametrize(
    ("prompts", "expected", "chunk_size"),
    [
        ([20], {"p0": 20}, 16),  # one prompt takes two rows
        ([40], {"p0": 32}, 16),
        ([8], {"p0": 8}, 4),
        ([9], {"p0": 9}, 16),
        ([4, 4], {"p0": 4, "p1": 4}, 4),
        ([1, 5], {"p0": 1, "p1": 5}, 16),
        ([20, 20], {"p0": 20}, 16),
        ([3, 3, 3], {"p0": 3, "p1": 3}, 4),  # a row never holds two prompts
    ],
)
def test_rows_hold_one_prompt_each_and_the_smallest_graph_is_chosen(
    prompts: list[int], expected: dict[str, int], chunk_size: int
) -> None:
    scheduler = make(chunk=16, buckets=(4,), rows=2, max_bypass=0)
    add(scheduler, *(request(f"p{index}", length) for index, length in enumerate(prompts)))
    step = next_step(scheduler)
    assert (counts(step), step.graph.chunk_size) == (expected, chunk_size)
