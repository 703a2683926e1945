# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine in this process over a cache of blocks: the tokens of slots, and vLLM's own metrics count hits and preemptions."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llm_answers import NEW, ask, graph_runner, random_prompt
from vllm import LLM, SamplingParams

from optimum_neuron.artifact.artifact import Artifact


BLOCK, LENGTH = 64, 512
BLOCKS = {"kv_block_size": BLOCK, "kv_cache_tokens": 2 * LENGTH}
SMALL = BLOCKS | {"kv_cache_tokens": LENGTH}
PROMPTS = [random_prompt(length) for length in (1, 33, 64, 65, 100, 300, 5, 7, 128)]
Greedy = Callable[[list[int], int], list[int]]


def counted(llm: LLM) -> dict[str, float]:
    """vLLM's counters and gauges."""
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


def check_all_is_free(llm: LLM) -> None:
    assert counted(llm)["vllm:kv_cache_usage_perc"] == 0
    runner = graph_runner(llm)
    ask(llm, [[5]], 1)  # tells the worker who ended last
    assert runner.tables is not None and runner.tables.counts.sum() <= 1


@pytest.mark.parametrize("target", ["eager", "cpu"])
def test_a_prefix_is_shared_by_reference_and_the_tokens_are_those_of_slots(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM], greedy: Greedy, target: str
) -> None:
    llm = open_llm(export_text(**BLOCKS, target=target), disable_log_stats=False)
    expected = [greedy(prompt, NEW) for prompt in PROMPTS]
    assert ask(llm, PROMPTS) == expected
    before = counted(llm)
    other = [*PROMPTS[5][:200], 9]
    assert ask(llm, [PROMPTS[5], other]) == [expected[5], greedy(other, NEW)]
    after = counted(llm)
    assert after["vllm:prefix_cache_hits"] - before["vllm:prefix_cache_hits"] == (300 // BLOCK + 200 // BLOCK) * BLOCK
    assert after["vllm:prefix_cache_queries"] - before["vllm:prefix_cache_queries"] == 300 + 201
    assert after["vllm:num_preemptions"] == 0
    check_all_is_free(llm)


@pytest.mark.parametrize(
    "options", [{}, {"async_scheduling": False, "max_num_batched_tokens": 200}], ids=["async", "sync, larger steps"]
)
def test_requests_that_outgrow_the_cache_are_computed_again_and_get_the_same_tokens(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM], greedy: Greedy, options: dict[str, Any]
) -> None:
    llm = open_llm(export_text(**SMALL), disable_log_stats=False, **options)
    prompts = [random_prompt(110 + index, index) for index in range(6)]
    assert ask(llm, prompts, 30) == [greedy(prompt, 30) for prompt in prompts]
    assert counted(llm)["vllm:num_preemptions"] > 0
    check_all_is_free(llm)


def test_seeds_and_log_probabilities_are_those_of_slots_though_requests_are_preempted(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM]
) -> None:
    prompts = [{"prompt_token_ids": random_prompt(110, seed)} for seed in range(5)]
    each = [
        SamplingParams(max_tokens=30, temperature=1.0, top_k=40, seed=seed, ignore_eos=True, logprobs=logprobs)
        for seed, logprobs in enumerate((None, 2, None, 3, 0))
    ]
    answers = []
    for sizes in ({}, SMALL):
        llm = open_llm(export_text(**sizes))
        answers.append([output.outputs[0] for output in llm.generate(prompts, each, use_tqdm=False)])
    for slots, blocks in zip(*answers, strict=True):
        assert list(blocks.token_ids) == list(slots.token_ids)
        assert (slots.logprobs is None) == (blocks.logprobs is None)
        for one, other in zip(slots.logprobs or (), blocks.logprobs or (), strict=True):
            for token, logprob in one.items():
                assert other[token].logprob == pytest.approx(logprob.logprob, abs=1e-4)
                assert other[token].rank == logprob.rank


def test_an_abort_frees_blocks_for_others(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM], greedy: Greedy
) -> None:
    llm = open_llm(export_text(**SMALL))
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, detokenize=False)
    engine.add_request("whole", {"prompt_token_ids": random_prompt(460)}, params)
    for _ in range(20):
        engine.step()
    engine.abort_request(["whole"])
    prompt = random_prompt(460, 1)
    assert ask(llm, [prompt]) == [greedy(prompt, NEW)]


def test_vllm_counts_the_bytes_and_tokens_of_the_compiled_cache(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM]
) -> None:
    path = export_text(**SMALL)
    core = open_llm(path).llm_engine.engine_core.engine_core
    stored = sum(math.prod(state.shape) * 4 for state in Artifact.open(path).states())
    assert stored <= core.model_executor.driver_worker.worker.determine_available_memory() < stored * 1.01
    manager = core.scheduler.kv_cache_manager
    assert manager.block_pool.num_gpu_blocks == LENGTH // BLOCK + 1
    assert (core.scheduler.block_size, core.scheduler.connector) == (BLOCK, None)
