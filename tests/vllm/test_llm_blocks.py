# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine over a cache of blocks, and over a model whose slots keep more than keys and values: the tokens of slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import recurrent
import torch
from llm_answers import NEW, ask, ask_each, graph_runner, greedy, random_prompt
from transformers import AutoModelForCausalLM
from vllm import LLM

from optimum_neuron import NeuronConfig, export_model
from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.step.state_specs import byte_count


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


def test_a_prefix_is_shared_by_reference_and_the_tokens_are_those_of_slots(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM], greedy: Greedy
) -> None:
    llm = open_llm(export_text(**BLOCKS, target="cpu"), disable_log_stats=False)
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


def test_seeds_and_log_probabilities_are_those_of_slots_though_requests_are_preempted(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM]
) -> None:
    prompts = [random_prompt(110, seed) for seed in range(5)]
    each = [{"seed": seed, "logprobs": logprobs} for seed, logprobs in enumerate((None, 2, None, 3, 0))]
    answers = []
    for sizes in ({}, SMALL):
        llm = open_llm(export_text(**sizes), disable_log_stats=False)
        found = ask_each(llm, prompts, each, max_tokens=30, temperature=1.0, top_k=40)
        answers.append([output.outputs[0] for output in found])
    assert counted(llm)["vllm:num_preemptions"] > 0
    check_all_is_free(llm)
    for slots, blocks in zip(*answers, strict=True):
        assert list(blocks.token_ids) == list(slots.token_ids)
        assert (slots.logprobs is None) == (blocks.logprobs is None)
        for one, other in zip(slots.logprobs or (), blocks.logprobs or (), strict=True):
            for token, logprob in one.items():
                assert other[token].logprob == pytest.approx(logprob.logprob, abs=1e-4)
                assert other[token].rank == logprob.rank


SIZES = NeuronConfig(
    batch_size=4, sequence_length=128, prefill_chunk_size=16, dtype="float32", output_logits=True, target="eager"
)
STATE_BLOCKS = dataclasses.replace(SIZES, kv_block_size=64, kv_cache_tokens=256)


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    if request.param == "lfm2":
        return tiny_checkpoints["lfm2"]
    recurrent.model(request.param).save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize(
    ("checkpoint", "sizes"),
    [("lfm2", SIZES), ("gated delta", STATE_BLOCKS), ("mamba2", SIZES), ("qwen3_5_text", SIZES)],
    indirect=["checkpoint"],
    ids=["slots", "a hybrid over blocks", "recurrences alone", "whose code in vLLM needs torchvision"],
)
def test_prompts_that_start_alike_get_what_transformers_gives_them(
    checkpoint: Path, tmp_path: Path, open_llm: Callable[..., LLM], sizes: NeuronConfig
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    path = export_model(checkpoint, tmp_path / "out", config=sizes)
    shared = random_prompt(70, vocab=300)
    prompts = [shared + random_prompt(length, vocab=300) for length in (1, 9, 24, 2, 30, 5)]
    expected = [greedy(model, prompt, NEW) for prompt in prompts]
    # Of models without attention vLLM leaves it off by itself.
    llm = open_llm(path, skip_tokenizer_init=True, disable_log_stats=False, enable_prefix_caching=True)
    for _ in range(2):  # the second time all slots hold what they could be asked for
        assert ask(llm, prompts) == expected
    # What an answer ends with begins the next question.
    longer = [prompt + answer + [7] for prompt, answer in zip(prompts, expected, strict=True)]
    assert ask(llm, longer) == [greedy(model, prompt, NEW) for prompt in longer]
    hits = next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits")
    assert hits > 0
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    artifact = Artifact.open(path)
    stored = byte_count((*artifact.states(), *artifact.kept_states()))
    assert stored <= worker.determine_available_memory() < stored * 1.01
