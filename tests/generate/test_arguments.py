# SPDX-License-Identifier: Apache-2.0
"""What generate cannot honour is refused in one sentence, before anything runs: no argument is ignored."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import export_tiny
from transformers import CompileConfig, GenerationConfig, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.runtime.refused import warn_once


IDS = torch.tensor([[5, 6, 7, 8, 9]])
ONES = torch.ones_like(IDS)


@pytest.fixture(scope="module")
def model(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> NeuronModelForCausalLM:
    """Without decode logits."""
    path = export_tiny(sharp_checkpoints["llama"], tmp_path_factory.mktemp("plain") / "artifact", output_logits=False)
    return NeuronModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_ids": IDS}, "generate does not take position_ids: .* number positions from the attention mask"),
        ({"is_causal": False}, "generate does not take is_causal"),
        ({"cu_seq_lens_q": IDS[0]}, "generate does not take cu_seq_lens_q"),
        ({"output_router_logits": True}, "generate does not take output_router_logits"),
        ({"inputs_embeds": torch.zeros(1, 2, 4)}, "generate does not take inputs_embeds"),
        ({"max_new_tokns": 3}, "generate does not take max_new_tokns: .* correct the name"),
        ({"use_cache": False}, "use_cache=False is not supported"),
        ({"generation_config": GenerationConfig(use_cache=False)}, "use_cache=False is not supported"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized' is not supported"),
        ({"num_beams": 2}, "num_beams=2 is not supported: compiled graphs advance one sequence per row; leave it out"),
        ({"prompt_lookup_num_tokens": 1}, "prompt_lookup_num_tokens=1 is not supported"),
        ({"assistant_model": torch.nn.Linear(1, 1)}, "assistant_model is not supported"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5 is not supported: it needs a second cache per row"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True is not supported"),
        ({"negative_prompt_ids": IDS}, "negative_prompt_ids is not supported"),
        ({"num_return_sequences": 0}, "num_return_sequences=0 must be at least 1"),
        ({"attention_mask": torch.ones(1, 7)}, r"attention_mask has the shape \[1, 7\], and input_ids \[1, 5\]"),
        ({"attention_mask": torch.ones(1, 2)}, r"attention_mask has the shape \[1, 2\]"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask has the shape \[2, 5\]"),
        ({"attention_mask": ONES[0]}, r"attention_mask has the shape \[5\]"),
        ({"attention_mask": ONES * 0.5}, "attention_mask has other values than 1"),
        ({"attention_mask": ONES * torch.nan}, "attention_mask has other values than 1"),
        ({"attention_mask": -ONES}, "attention_mask has other values than 1"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}, "row 0 of attention_mask has a hole"),
    ],
)
def test_a_value_that_cannot_be_honoured(model: Any, options: dict[str, Any], message: str) -> None:
    calls = model.runner.graph_calls.copy()
    with pytest.raises(ValueError, match=message):
        model.generate(IDS, **{"max_new_tokens": 2} | options)
    assert model.runner.graph_calls == calls


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5, a float; give a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens is True, a bool"),
        ({"max_new_tokens": "4"}, "max_new_tokens is '4', a str"),
        ({"max_new_tokens": None, "max_length": 6.5}, "max_length is 6.5, a float"),
        ({"min_new_tokens": 1.0}, "min_new_tokens is 1.0, a float"),
        ({"eos_token_id": 2.0}, "eos_token_id is 2.0, a float"),
        ({"eos_token_id": [2, 3.5]}, "eos_token_id is 3.5, a float"),
        ({"pad_token_id": 0.5}, "pad_token_id is 0.5, a float"),
        ({"generation_config": {"max_new_tokens": 2}}, "generation_config is a dict"),
        ({"logits_processor": TopKLogitsWarper(5)}, "logits_processor is a TopKLogitsWarper; give a list"),
        ({"stopping_criteria": max}, "stopping_criteria is a .*; give a list"),
        ({"attention_mask": [[1] * 5]}, "attention_mask is a list"),
    ],
)
def test_a_value_of_the_wrong_type(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        model.generate(IDS, **{"max_new_tokens": 2} | options)


@pytest.mark.parametrize("inputs", [IDS.tolist(), IDS.numpy(), "text", None])
def test_prompts_that_are_no_tensor(model: Any, inputs: Any) -> None:
    for call in (model, model.generate) if inputs is not None else (model,):
        with pytest.raises(TypeError, match=rf"input_ids hold {type(inputs).__name__}; give a tensor"):
            call(inputs)


@pytest.mark.parametrize("inputs", [IDS[0], IDS[None], IDS[:, :0], IDS[:0]])
def test_prompts_that_are_no_rows_of_tokens(model: Any, inputs: torch.Tensor) -> None:
    for call in (model, lambda ids: model.generate(ids, max_new_tokens=2)):
        with pytest.raises(ValueError, match=r"input_ids have the shape .*; give \[rows, tokens\] on the CPU"):
            call(inputs)


def test_a_packed_rows_bounds_are_whole_numbers(model: Any) -> None:
    for bounds in (torch.tensor([0, 2.5, 5]), [0, 2, 5]):
        with pytest.raises(TypeError, match="cu_seqlens hold"):
            model(IDS, cu_seq_lens_q=bounds)


def test_what_a_checkpoint_says_of_its_training_is_no_request(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many were saved with use_cache=False, which changes no token."""
    expected = model.generate(IDS, max_new_tokens=4, do_sample=False)
    monkeypatch.setattr(model, "generation_config", GenerationConfig(use_cache=False, cache_implementation="hybrid"))
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.parametrize(
    "inert",
    [
        {"disable_compile": True}, {"cache_implementation": "static"}, {"cache_config": {"axis_key": 1}},
        {"compile_config": CompileConfig()}, {"prefill_chunk_size": 3},
        {"use_cache": True, "disable_compile": False, "num_beams": 1, "guidance_scale": 1.0, "output_hidden_states": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_no_token_is_taken_and_said_once(
    model: Any, inert: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    expected = model.generate(IDS, max_new_tokens=4, do_sample=False)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "optimum_neuron"):
        for _ in range(2):
            assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False, **inert), expected)
            config = GenerationConfig(max_new_tokens=4, do_sample=False, **inert)
            assert model.generate_batch(IDS.tolist(), config)["req_0"].generated_tokens == expected[0, 5:].tolist()
    (name, value), *others = inert.items()
    said = [] if others else [f"{name}={value!r} has no effect: the graphs and their cache were made at export"]
    assert [each.getMessage() for each in caplog.records if each.name.startswith("optimum_neuron")] == said


@pytest.mark.parametrize(
    "warper",
    [TopPLogitsWarper(0.5, min_tokens_to_keep=3), TopPLogitsWarper(0.5, -1.0), TopKLogitsWarper(5, filter_value=-1.0)],
)
def test_a_warper_with_more_than_its_strength_is_applied_on_the_host(model: Any, warper: Any) -> None:
    words = rf"{type(warper).__name__} with .*=.* is applied to logits .* --output-logits"
    with pytest.raises(ValueError, match=words):
        model.generate(IDS, max_new_tokens=2, do_sample=True, top_k=0, logits_processor=LogitsProcessorList([warper]))


@pytest.mark.parametrize(
    ("config", "batching", "error", "message"),
    [
        ({"max_new_tokens": 2}, None, TypeError, "generation_config is a dict"),
        (GenerationConfig(max_new_tokens=2), {"seed": 2}, TypeError, "continuous_batching_config is a dict"),
        (GenerationConfig(max_new_tokens=2, num_return_sequences=0), None, ValueError, "num_return_sequences=0"),
        (GenerationConfig(max_length=6.5), None, TypeError, "max_length is 6.5"),
        (GenerationConfig(max_new_tokens=2, token_healing=True), None, ValueError, "token_healing=True"),
        (GenerationConfig(max_new_tokens=2, output_scores=True), None, ValueError, "output_scores=True"),
        (GenerationConfig(forced_eos_token_id=300), None, ValueError, "forced_eos_token_id has the token id 300"),
    ],
)
def test_a_batch_refuses_the_same(
    model: Any, config: Any, batching: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        model.generate_batch([[5, 6]], config, batching)


@pytest.mark.parametrize("count", [1.5, "4", 0, -1, True])
def test_a_batch_whose_new_tokens_are_no_number_fails_by_request(model: Any, count: Any) -> None:
    outputs = model.generate_batch([[5, 6]], GenerationConfig(do_sample=False), max_new_tokens=count)
    assert "max_new_tokens" in str(outputs["req_0"].error)
