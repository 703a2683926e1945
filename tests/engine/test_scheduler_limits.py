# SPDX-License-Identifier: Apache-2.0
"""What the scheduler refuses, and the chunk sizes that it derives from measured times."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from scheduling import TOKEN, add, advance, commit, counts, make, next_step, request

from optimum_neuron.config import NeuronConfig
from optimum_neuron.core import Request
from optimum_neuron.engine.policy import SchedulerOptions, StepCosts, resolve_policy
from optimum_neuron.engine.scheduler import Scheduler
from optimum_neuron.engine.statistics import Statistics
from optimum_neuron.step.family import GraphFamily
from optimum_neuron.step.spec import GraphKind, GraphSpec, graph_specs


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("x", 0), "has 0 tokens"),
        (request("x", 3, new=0), "max_new_tokens=0"),
        (
            request("x", 250, new=8),
            "the prompt of request 'x' of 250 tokens and 8 new tokens do not fit sequence_length=256; lower .* to 7",
        ),
        (request("x", 257, new=None), "the prompt of request 'x' of 257 tokens does not fit sequence_length=256"),
        (request("live", 3), "is not finished"),
        (request("x", 17, atomic=True), r"17 prompt tokens.* 2 \* 8 = 16"),
        (request("x", 10, atomic=True), "leaves 9 for prompts.* by 1"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_and_leaves_nothing(bad: Request, message: str) -> None:
    scheduler = make(slots=4, chunk=8, rows=2, max_step_tokens=12)
    add(scheduler, request("live", 250, new=7), request("image", 9, atomic=True))
    with pytest.raises(ValueError, match=message):
        scheduler.check_request(bad)
    with pytest.raises(ValueError, match=message):
        scheduler.add_request(bad)
    assert len(scheduler.queues.waiting) == 2


@pytest.mark.parametrize(
    ("tokens", "error"), [([1.5], TypeError), ([[1, 2]], ValueError), ([-1], ValueError), ([2**31], ValueError)]
)
def test_a_prompt_is_a_row_of_token_ids(tokens: list[Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="'x'"):
        request("x", tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fifo"}, "policy='fifo' is not known"),
        ({"max_step_tokens": 0}, "max_step_tokens=0"),
        ({"max_step_tokens": 4}, "must exceed batch_size=4"),
        ({"long_prefill_token_threshold": -1}, "at least 0"),
        ({"itl_target_ms": 0}, "itl_target_ms=0"),
        ({"itl_target_ms": 5.0, "policy": "all_chunks"}, "choose policy 'mixed' or 'alternate'"),
        ({"max_bypass": -1}, "max_bypass=-1"),
        ({"chunk_alignment": 0}, "chunk_alignment=0"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(slots=4, **options)


def test_mixed_steps_need_mixed_graphs() -> None:
    assert resolve_policy("auto", True) == "mixed" and resolve_policy("auto", False) == "alternate"
    with pytest.raises(ValueError, match="mixed_step=True"):
        resolve_policy("mixed", False)


def test_a_step_is_committed_once_and_with_all_its_tokens() -> None:
    scheduler = make(chunk=4)
    add(scheduler, request("a", 9))
    step = next_step(scheduler)
    with pytest.raises(ValueError, match="1 prompt pieces got 0 and 0 tokens"):
        scheduler.commit(step, [], [])
    commit(scheduler, step)
    with pytest.raises(RuntimeError, match="does not continue"):
        scheduler.commit(step, [], [TOKEN])


# Chunk sizes from measured times


def graph(kind: GraphKind, chunk_size: int) -> GraphSpec:
    return replace(graph_specs(NeuronConfig(sequence_length=256))[0], kind=kind, chunk_size=chunk_size)


def costs(*times: tuple[GraphKind, int, float]) -> StepCosts:
    table = StepCosts()
    for kind, chunk_size, seconds in times:
        table.record_time(graph(kind, chunk_size), seconds)
    return table


@pytest.mark.parametrize(
    ("times", "target", "expected"),
    [
        ([], 1.0, 64),  # nothing known: the smallest
        ([("mixed", 64, 0.03)], 0.1, 128),  # without the decode time the estimate is proportional: .06 and .12
        ([("mixed", 64, 0.03), ("token_generation", 0, 0.02)], 0.1, 256),  # .02 + .01 * size / 64
        ([("mixed", 64, 0.03), ("token_generation", 0, 0.02)], 0.05, 128),
        ([("mixed", 64, 0.03), ("mixed", 256, 0.2), ("token_generation", 0, 0.02)], 0.1, 128),
        ([("mixed", 64, 0.3)], 0.1, 64),  # never below the smallest
    ],
)
def test_the_largest_chunk_within_the_target_is_chosen(
    times: list[tuple[GraphKind, int, float]], target: float, expected: int
) -> None:
    assert costs(*times).largest_within(target, (64, 128, 256), "mixed") == expected


def test_between_chunk_and_decode_steps_the_pause_is_both() -> None:
    table = costs(("chunked_prefill", 64, 0.03), ("chunked_prefill", 128, 0.05), ("token_generation", 0, 0.02))
    assert table.largest_within(0.07, (64, 128), "chunked_prefill") == 128
    assert table.largest_within(0.069, (64, 128), "chunked_prefill") == 64


def test_a_size_that_was_slow_once_is_tried_again_and_a_hiccup_does_not_count() -> None:
    table = costs(("mixed", 64, 0.02), ("token_generation", 0, 0.01), *[("mixed", 128, 0.03)] * 3, ("mixed", 128, 9.0))
    assert table.largest_within(0.05, (64, 128), "mixed") == 128
    for _ in range(9):
        table.record_time(graph("mixed", 128), 9.0)
    assert table.largest_within(0.05, (64, 128), "mixed") == 64
    for _ in range(129):
        table.record_time(graph("mixed", 64), 0.02)
    assert table.largest_within(0.05, (64, 128), "mixed") == 128


def test_a_target_limits_chunks_only_while_someone_decodes() -> None:
    scheduler = make(slots=2, chunk=64, buckets=(8,), length=256, itl_target_ms=5.0)
    add(scheduler, request("a", 100))
    assert counts(next_step(scheduler)) == {"a": 64}
    advance(scheduler, 2)
    add(scheduler, request("b", 100))
    step = next_step(scheduler)
    assert (step.graph.kind, step.graph.chunk_size) == ("mixed", 8)
    commit(scheduler, step, 0.0001)
    commit(scheduler, next_step(scheduler), 0.0001)
    assert next_step(scheduler).graph.chunk_size == 64


def test_costs_and_counts_are_those_of_the_graph_that_ran() -> None:
    """Every step runs in the largest mixed graph: smaller chunks would make no step shorter, and idle rows are computed."""
    config = NeuronConfig(
        batch_size=2, sequence_length=256, prefill_chunk_size=64, prefill_chunk_buckets=(8,), context_buckets=(64, 256)
    )
    family = GraphFamily(graph_specs(config), deterministic=True)
    scheduler = Scheduler(config, SchedulerOptions(itl_target_ms=5.0), family)
    counted = Statistics()
    add(scheduler, request("a", 3), request("b", 100))
    for expected in ({"a": 3}, {"b": 64}, {"b": 36}, {}):
        step = next_step(scheduler)
        assert (step.graph.name, counts(step)) == ("mixed_chunk64_context256", expected)
        commit(scheduler, step, 0.02)  # slower than the target
        counted.count_step(step)
    assert (counted.prompt_tokens, counted.padded_prompt_tokens) == (103, 4 * 64 - 103)
    assert (counted.decode_tokens, counted.idle_decode_rows) == (4, 4 * 2 - 4)


def test_the_scheduler_needs_no_torch() -> None:
    code = "import sys; import optimum_neuron.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
