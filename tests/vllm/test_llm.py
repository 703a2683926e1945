# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine in this process: its greedy tokens are those of `generate`, here and in transformers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from llm_answers import KINDS, NEW, ask, graph_runner, greedy, random_prompt
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

from optimum_neuron.runtime.runner import GraphRunner


CHUNK, LENGTH = 32, 512
# around one chunk and two, one token, several chunks, and more prompts than slots
LENGTHS = (1, 2, 31, 32, 33, 64, 65, 100, 300, 5, 7)
Reference = Callable[[Sequence[int], int], list[int]]


PROMPTS = [random_prompt(length) for length in LENGTHS]


@pytest.fixture(scope="session")
def reference(text_model: Any) -> Reference:
    """Greedy tokens of the tiny checkpoint in transformers."""
    known: dict[tuple[int, ...], list[int]] = {}

    def tokens(prompt: Sequence[int], count: int) -> list[int]:
        key = tuple(prompt)
        if len(known.get(key, ())) < count:
            known[key] = greedy(text_model, prompt, count)
        return known[key][:count]

    return tokens


# Sizes of the artifact and options of the engine, by what is special about them.
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it comes": ({}, {}),
    "odd small budget, priorities": ({}, {"max_num_batched_tokens": 7, "async_scheduling": False, "scheduling_policy": "priority"}),
    "chunked prefill off": ({}, {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}),
    "three requests, shorter than compiled": ({}, {"max_num_seqs": 3, "max_model_len": 317, "long_prefill_token_threshold": 9}),
    "no mixed graphs, no logits": ({"mixed_step": False, "context_buckets": (128, 512), "output_logits": False}, {}),
    "two rows": ({"ctx_batch_size": 2, "prefill_chunk_size": 16, "prefill_chunk_buckets": (4,)}, {}),
    "more slots than a chunk has tokens": ({"batch_size": 6, "prefill_chunk_size": 4}, {}),
}  # fmt: skip
COUNTS = [NEW - index % 5 for index in range(len(PROMPTS))]


@pytest.mark.parametrize("name", ENGINES)
def test_greedy_tokens_are_transformers_whatever_was_compiled_and_whatever_the_options(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM], reference: Reference, name: str
) -> None:
    sizes, options = ENGINES[name]
    llm = open_llm(export_text(**sizes), **options)
    expected = [reference(prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]
    calls = graph_runner(llm).graph_calls
    calls.clear()
    assert ask(llm, PROMPTS, COUNTS) == expected
    assert any(graph.startswith("mixed") for graph in calls) == sizes.get("mixed_step", True)
    # the same again: prefixes are reused now, and prompts come in another order
    assert ask(llm, PROMPTS[::-1], COUNTS[::-1]) == expected[::-1]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_one_thread_runs_all_graphs_from_the_first_run_on(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    threads: dict[str, set[int]] = {}

    def watch(name: str) -> None:
        real = getattr(GraphRunner, name)

        def watched(runner: GraphRunner, *args: Any, **options: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return real(runner, *args, **options)

        monkeypatch.setattr(GraphRunner, name, watched)

    watch("warm_up")
    watch("run_step")
    ask(open_llm(export_text(), async_scheduling=asynchronous), [PROMPTS[3]], 4)
    assert threads["warm_up"] == threads["run_step"] and len(threads["run_step"]) == 1
    assert (threading.get_ident() in threads["run_step"]) is not asynchronous


def test_requests_fill_their_slots_to_the_last_token(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM], reference: Reference
) -> None:
    llm = open_llm(export_text())
    prompts = [random_prompt(length) for length in (LENGTH - 1, LENGTH - 2, LENGTH - 20)]
    assert ask(llm, prompts, 100) == [reference(prompt, LENGTH - len(prompt)) for prompt in prompts]
    host = ask(llm, prompts, 100, logprobs=0)
    assert host == [reference(prompt, LENGTH - len(prompt)) for prompt in prompts]
    for length in (LENGTH, LENGTH + 1):
        with pytest.raises(VLLMValidationError, match=r"maximum (model|context) length"):
            ask(llm, [random_prompt(length)])


def test_stop_tokens_end_requests_whose_next_step_has_already_begun(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM], reference: Reference
) -> None:
    llm = open_llm(export_text())
    prompts = [random_prompt(40, seed) for seed in range(8)]
    expected = [reference(prompt, 8) for prompt in prompts]
    stops = [tokens[3] for tokens in expected]
    for seed, (prompt, stop) in enumerate(zip(prompts, stops, strict=True)):
        wanted = expected[seed][: expected[seed].index(stop) + 1]
        assert ask(llm, [prompt], 8, stop_token_ids=[stop]) == [wanted]
    assert ask(llm, prompts, 8) == expected


def add(llm: LLM, name: str, prompt: Sequence[int], count: int, **params: Any) -> None:
    params = {"temperature": 0, "ignore_eos": True} | params
    llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, SamplingParams(max_tokens=count, **params))


def finish(llm: LLM, each_step: Callable[[int], None] = lambda step: None) -> dict[str, list[int]]:
    """Steps until nobody is left; returns the tokens of all who finished."""
    done: dict[str, list[int]] = {}
    step = 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        each_step(step)
        step += 1
    return done


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("options", [{}, {"kv_block_size": 64}], ids=["slots", "blocks"])
def test_resets_of_the_cache_under_load_change_no_answer_whoever_samples_it(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM], options: dict[str, Any], asynchronous: bool
) -> None:
    llm = open_llm(export_text(**options), async_scheduling=asynchronous)
    asked = {f"r{index}": (random_prompt(20 + 7 * index, index), KINDS[index % len(KINDS)]) for index in range(10)}
    chance = random.Random(3)
    resets = []

    def reset(step: int) -> None:
        if chance.random() < 0.3:
            resets.append(llm.llm_engine.reset_prefix_cache(reset_running_requests=True, reset_connector=step % 2 > 0))

    answers = []
    for each_step in (lambda step: None, reset):
        for name, (prompt, params) in asked.items():
            add(llm, name, prompt, 16, **params)
        answers.append(finish(llm, each_step))
    assert answers[0] == answers[1]
    assert len(resets) > 8 and all(resets)
