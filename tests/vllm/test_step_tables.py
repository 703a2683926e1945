# SPDX-License-Identifier: Apache-2.0
"""From a step of vLLM's scheduler to runs of graphs: which graph, which rows, and who gets a token."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from scheduler_outputs import GREEDY, Driver, random_prompt
from slot_model import answer
from vllm.config import VllmConfig


class Step(NamedTuple):
    """What is scheduled, which slots new requests get, and what is to come of it: runs, and who gets a token."""

    counts: dict[str, int]
    start: dict[str, int]
    runs: list[str]
    tokens: str
    finished: tuple[str, ...] = ()


class Table(NamedTuple):
    prompts: dict[str, int]
    steps: list[Step]
    sizes: dict[str, Any] = {}  # noqa: RUF012


TABLES = {
    "a prompt's last token is a chunk, not a decode": Table(
        {"a": 9, "b": 3},
        [
            Step({"b": 3, "a": 5}, {"b": 2, "a": 0}, ["chunked_prefill | 2:0+3", "chunked_prefill | 0:0+5"], "b"),
            Step({"b": 1, "a": 3}, {}, ["mixed 2 | 0:5+3"], "b"),
            Step({"b": 1, "a": 1}, {}, ["mixed 2 | 0:8+1"], "ab"),
            Step({"b": 1, "a": 1}, {}, ["token_generation 0,2"], "ab"),
        ],
    ),
    "a step larger than the graph's rows runs several, decodes in the first": Table(
        {"a": 2, "b": 2, "c": 21, "d": 5},
        [
            Step({"a": 2}, {"a": 0}, ["chunked_prefill | 0:0+2"], "a"),
            Step({"a": 1, "b": 2}, {"b": 1}, ["mixed 0 | 1:0+2"], "ab"),
            Step(
                {"a": 1, "b": 1, "c": 21, "d": 5},
                {"c": 2, "d": 3},
                [
                    "mixed 0,1 | 2:0+8",
                    "chunked_prefill | 2:8+8",
                    "chunked_prefill | 2:16+5",
                    "chunked_prefill | 3:0+5",
                ],
                "abcd",
            ),
            Step({"a": 1, "b": 1, "c": 1, "d": 1}, {}, ["token_generation 0,1,2,3"], "abcd"),
        ],
    ),
    "without mixed graphs the decodes run first": Table(
        {"a": 2, "b": 9},
        [
            Step({"a": 2}, {"a": 0}, ["chunked_prefill | 0:0+2"], "a"),
            Step({"a": 1, "b": 8}, {"b": 1}, ["token_generation 0", "chunked_prefill | 1:0+8"], "a"),
            Step({"a": 1, "b": 1}, {}, ["token_generation 0", "chunked_prefill | 1:8+1"], "ab"),
        ],
        {"mixed_step": False},
    ),
    "several prompts share the chunk rows of one run": Table(
        {"a": 3, "b": 8, "c": 12, "d": 4},
        [
            Step({"a": 3, "b": 8}, {"a": 0, "b": 1}, ["chunked_prefill | 0:0+3 | 1:0+8"], "ab"),
            Step({"a": 1, "b": 1, "c": 12}, {"c": 2}, ["mixed 0,1 | 2:0+8 | 2:8+4"], "abc"),
            Step({"a": 1, "b": 1, "c": 1, "d": 4}, {"d": 3}, ["mixed 0,1,2 | 3:0+4"], "abcd"),
        ],
        {"ctx_batch_size": 2},
    ),
    "rows are filled in vLLM's order, a prompt cut where they end": Table(
        {"a": 5, "b": 20, "c": 3},
        [
            Step(
                {"a": 5, "b": 20, "c": 3},
                {"a": 0, "b": 1, "c": 2},
                ["chunked_prefill | 0:0+5 | 1:0+8", "chunked_prefill | 1:8+8 | 1:16+4", "chunked_prefill | 2:0+3"],
                "abc",
            )
        ],
        {"ctx_batch_size": 2},
    ),
    "a step without tokens runs nothing": Table(
        {"a": 2, "b": 3},
        [
            Step({"a": 2}, {"a": 0}, ["chunked_prefill | 0:0+2"], "a"),
            Step({}, {}, [], "", finished=("a", "never heard of")),
            Step({"b": 3}, {"b": 0}, ["chunked_prefill | 0:0+3"], "b"),
            Step({}, {}, [], ""),
            Step({"b": 1}, {}, ["token_generation 0"], "b"),
        ],
    ),
}


@pytest.mark.parametrize("host", [False, True], ids=["graphs sample", "vllm samples"])
@pytest.mark.parametrize("name", TABLES)
def test_which_graphs_run_which_rows_and_who_gets_a_token(vllm_config: VllmConfig, name: str, host: bool) -> None:
    table = TABLES[name]
    prompts = {request: random_prompt(length, seed) for seed, (request, length) in enumerate(table.prompts.items())}
    driver = Driver(vllm_config, prompts, **table.sizes)
    if host:
        driver.params = {request: GREEDY | {"logprobs": 0} for request in prompts}
    for number, step in enumerate(table.steps):
        before = {request: len(tokens) for request, tokens in driver.tokens.items()}
        assert driver.step(step.counts, step.start, finished=step.finished) == step.runs, number
        got = "".join(sorted(request for request in prompts if len(driver.tokens[request]) > before[request]))
        assert got == step.tokens, number
    for request, tokens in driver.tokens.items():
        assert tokens == answer(prompts[request], len(tokens)), request
