# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine over a model whose slots keep more than keys and values: prefixes are reused with it, over slots and over blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import recurrent
import torch
from llm_answers import NEW, ask, greedy, random_prompt
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from optimum_neuron import NeuronConfig, export_model
from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.step.state_specs import byte_count


SIZES = NeuronConfig(
    batch_size=4, sequence_length=128, prefill_chunk_size=16, dtype="float32", output_logits=True, target="eager"
)
BLOCKS = dataclasses.replace(SIZES, kv_block_size=64, kv_cache_tokens=256)


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    if request.param == "lfm2":
        return tiny_checkpoints["lfm2"]
    recurrent.model(request.param).save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize(
    ("checkpoint", "sizes"),
    [
        ("lfm2", SIZES),
        ("lfm2", BLOCKS),
        ("gated delta", BLOCKS),
        ("nemotron_h", SIZES),
        ("mamba2", SIZES),
        ("qwen3_5_text", SIZES),
    ],
    indirect=["checkpoint"],
    ids=[
        "slots",
        "blocks",
        "a hybrid over blocks",
        "a hybrid",
        "recurrences alone",
        "whose code in vLLM needs torchvision",
    ],
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
    stored = byte_count((*artifact.states(), *artifact.snapshots()))
    assert stored <= worker.determine_available_memory() < stored * 1.01


@pytest.mark.parametrize(
    ("checkpoint", "sizes"),
    [("gated delta", BLOCKS), ("nemotron_h", SIZES)],
    indirect=["checkpoint"],
    ids=["preempted over blocks", "more than slots"],
)
def test_a_crowd_of_which_some_are_aborted_gets_what_transformers_gives_it(
    checkpoint: Path, tmp_path: Path, open_llm: Callable[..., LLM], sizes: NeuronConfig
) -> None:
    """Chunks beside decodes, in two rows of a step."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    path = export_model(checkpoint, tmp_path / "out", config=dataclasses.replace(sizes, ctx_batch_size=2))
    llm = open_llm(path, skip_tokenizer_init=True, disable_log_stats=False)
    engine = llm.llm_engine
    prompts = [random_prompt(30 + 5 * number, number, vocab=300) for number in range(6)]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    found: dict[str, list[int]] = {}
    for step in range(1000):
        if not engine.has_unfinished_requests():
            break
        if step in (2, 25):
            engine.abort_request([str(step % 2)])
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
    for number, prompt in enumerate(prompts):
        tokens = found.get(str(number), [])
        assert tokens == greedy(model, prompt, 40)[: len(tokens)] and (len(tokens) == 40 or number < 2)
    preemptions = next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    assert (preemptions > 0) == (sizes is BLOCKS)
