# SPDX-License-Identifier: Apache-2.0
"""Random workloads for vLLM's own scheduler: requests that share prefixes, aborts, resets of the prefix cache, and steps between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from real_schedules import Served
from scheduler_outputs import random_prompt


Action = tuple[str, Any]

SEEDED = {"temperature": 1.0, "top_k": 50, "seed": 5}
HOST = {"logprobs": 1}
TOPICS = 3


def workloads(
    shared: int, own: int, new_tokens: int, steps: int, aborted: int, most: int
) -> st.SearchStrategy[list[Action]]:
    """Actions: a request (topic, shared tokens, own tokens, new tokens, parameters), an abort, a reset, or some steps.

    Args:
        shared: tokens that a prompt begins with as others of its topic do, at most.
        own: other tokens of a prompt, at most.
        new_tokens: of an answer, at most.
        steps: of one action, at most.
        aborted: the highest number of a request that is aborted, whether it was ever added or not.
        most: actions, at most.
    """
    request = st.tuples(
        st.integers(0, TOPICS - 1),
        st.integers(0, shared),
        st.integers(1, own),
        st.integers(1, new_tokens),
        st.sampled_from([{}, SEEDED, HOST]),
    ).map(lambda request: ("add", request))
    others = (
        st.tuples(st.just("step"), st.integers(1, steps)),
        st.tuples(st.just("abort"), st.integers(0, aborted)),
        st.tuples(st.just("reset"), st.booleans()),
    )
    return st.lists(st.one_of(request, request, *others), min_size=1, max_size=most)


def play(engine: Served, actions: Sequence[Action]) -> None:
    """Does all actions, and steps until every request is finished; all answers are checked."""
    topics = [random_prompt(engine.sizes.sequence_length, seed) for seed in range(TOPICS)]
    for kind, value in actions:
        if kind == "add":
            topic, shared, own, new_tokens, params = value
            number = len(engine.requests)
            prompt = topics[topic][:shared] + random_prompt(own, number % 4)
            engine.add(f"r{number}", prompt, new_tokens, priority=number % 3, **params)
        elif kind == "step":
            for _ in range(value):
                engine.step()
        elif kind == "abort":
            engine.abort(f"r{value}")
        else:
            engine.reset(value)
    engine.run()
    engine.check_answers()
