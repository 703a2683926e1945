# SPDX-License-Identifier: Apache-2.0
"""Random workloads under vLLM's own scheduler: nobody waits for ever, and no copied row changes a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers import examples
from hypothesis import HealthCheck, example, given
from real_schedules import HOST, SEEDED, Served, play, workloads
from scheduler_outputs import random_prompt
from vllm.config import VllmConfig


# A reset lets all requests change slots, and then some of them are preempted, or finish, where another was before.
SHORT = ("add", (0, 0, 1, 3, {}))
SWAPPED = [
    ("add", (0, 21, 20, 9, {})),
    SHORT,
    ("step", 6),
    SHORT,
    SHORT,
    ("step", 3),
    SHORT,
    SHORT,
    ("reset", True),
] * 2
# The first leaves rows, the second a snapshot where it parts from them, and others go on behind that.
ALIKE: list[tuple[str, Any]] = [
    action for own in (3, 4, 5, 6, 7) for action in (("add", (0, 40, own, 3, {})), ("step", 12))
]
# A preempted request continues after its own prompt, which the connector noted when another request arrived.
RESUMED: list[tuple[str, Any]] = [("add", (0, 40, 3, 12, {})), ("step", 5), ("add", (1, 20, 1, 9, {})), ("step", 2)]
RESUMED.append(("reset", False))
# Artifacts and engine options, by what is special about them.
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one row": ({}, {}),
    "one row, async": ({}, {"async_scheduling": True}),
    "two rows": ({"ctx_batch_size": 2}, {}),
    "two rows, async, threshold": (
        {"ctx_batch_size": 2},
        {"async_scheduling": True, "long_prefill_token_threshold": 5},
    ),
    "whole prompts, async": ({}, {"async_scheduling": True, "max_num_batched_tokens": 400}),
    "tiny budget": ({}, {"max_num_batched_tokens": 3, "max_num_seqs": 3}),
    "no mixed graphs": ({"mixed_step": False}, {}),
    "more slots than chunk tokens": ({"batch_size": 6, "prefill_chunk_size": 4}, {}),
    "priorities": ({}, {"scheduling_policy": "priority"}),
    "one request at a time": ({}, {"max_num_seqs": 1, "async_scheduling": True}),
}


SIZES = {"sequence_length": 96, "prefill_chunk_size": 8}


@pytest.fixture(scope="module")
def configure(configured: Callable[..., VllmConfig]) -> Callable[[str], VllmConfig]:
    def one(name: str) -> VllmConfig:
        sizes, options = ENGINES[name]
        return configured(SIZES | sizes, {"async_scheduling": False} | options)

    return one


@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
@pytest.mark.parametrize("name", ENGINES)
@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=workloads(shared=50, own=20, new_tokens=12, steps=5, aborted=30, most=30))
@example(actions=SWAPPED)
def test_all_requests_get_their_tokens_in_steps_that_fit(
    configure: Callable[[str], VllmConfig], name: str, ahead: bool, actions: list[tuple[str, Any]]
) -> None:
    play(Served(configure(name), ahead=ahead), actions)


@pytest.mark.parametrize(
    "name", ["two rows, async, threshold", "whole prompts, async", pytest.param("tiny budget", marks=pytest.mark.full)]
)
def test_state_is_that_of_the_tokens_which_a_slot_goes_on_behind(
    configured: Callable[..., VllmConfig], name: str
) -> None:
    """Of a model that keeps state, with fewer snapshots than slots, and as many as there are by default, on a device that runs ahead."""
    sizes, options = ENGINES[name]

    def check(config: VllmConfig, *, ahead: bool) -> int:
        hits = 0

        @examples(20)
        @given(actions=workloads(shared=50, own=20, new_tokens=12, steps=5, aborted=30, most=30))
        @example(actions=SWAPPED)
        @example(actions=ALIKE)
        @example(actions=RESUMED)
        def serve(actions: list[tuple[str, Any]]) -> None:
            nonlocal hits
            engine = Served(config, ahead=ahead)
            play(engine, actions)
            hits += sum(map(len, engine.reused))

        serve()
        return hits

    for snapshots, interval, ahead in ((3, 12, False), (None, None, True)):
        kept = {"state_snapshots": snapshots, "state_snapshot_interval": interval}
        config = configured(SIZES | sizes | kept, {"async_scheduling": False} | options, stateful=True)
        assert check(config, ahead=ahead)


@pytest.mark.parametrize("host", [False, True], ids=["graphs sample", "one by the host"])
def test_a_step_is_started_before_the_one_ahead_of_it_is_read_and_logits_are_for_who_wants_them(
    configure: Callable[[str], VllmConfig], host: bool
) -> None:
    engine = Served(configure("one row, async"), ahead=True)
    for number, params in enumerate(({}, HOST, SEEDED) if host else ({}, SEEDED)):
        engine.add(f"r{number}", random_prompt(5, number), 4 + 3 * number if host else 12, **params)
    engine.finish()
    device = engine.device
    assert device is not None
    if host:
        assert {"decode.logits"} < {name for names in device.transfers for name in names}
        assert device.transfers[-2] == ["decode.tokens"]  # the one that wants none is left
        return
    # After the prompts, whose steps vLLM waits for: each step is started, then the one ahead of it read, tokens alone.
    first, last = 4, len(device.transfers) - 1
    for number in range(first, last):
        place = device.log.index(f"start {number}")
        assert device.log[place + 1] == f"read {number - 1}"
    assert all(names == ["decode.tokens"] for names in device.transfers[first:])
