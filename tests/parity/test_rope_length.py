# SPDX-License-Identifier: Apache-2.0
"""Rotary frequencies that follow the length of a text: exact where an artifact's texts need only one choice, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import artifact_runner, export_tiny, load_model, prefill_pieces, random_tokens, tiny_config
from sharp import sharpen
from tiny import TINY_SIZES
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2_5_VLTextConfig

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.checkpoints.language_model import register_language_model
from optimum_neuron.parity.inspect import check_fixed_shapes, inspect_model
from optimum_neuron.parity.text_length import check_text_length, keep_frequencies, take_long_frequencies
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.interface import ATTENTION_NAME
from optimum_neuron.step.program import export_graph
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.step.state_specs import state_specs


SHORT = 24  # tokens up to which a text keeps the frequencies that it begins with
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 256 / SHORT, "original_max_position_embeddings": SHORT,
    "short_factor": [1.0] * 8, "long_factor": [1.0 + index for index in range(8)],
}  # fmt: skip
# By their definition.
LONG_FREQUENCIES = 1.0 / (torch.tensor(LONGROPE["long_factor"]) * 1e4 ** (torch.arange(0, 16, 2).float() / 16))
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def save(rope: dict[str, Any], folder: Path) -> Path:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY_SIZES, rope_parameters=rope), dtype=torch.float32)
    sharpen(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def longrope(tmp_path: Path) -> Path:
    return save(LONGROPE, tmp_path / "longrope")


def test_texts_that_may_outgrow_their_frequencies_are_refused(longrope: Path, tmp_path: Path) -> None:
    for length in (SHORT + 1, 200):
        words = (
            rf"LlamaForCausalLM cannot be exported with sequence_length={length}: model\.rotary_emb gives all tokens .* once it "
            rf"has more than {SHORT} tokens, .* choose a sequence_length of at most {SHORT}, or give all texts .*--long-frequencies\)$"
        )
        with pytest.raises(ValueError, match=words):
            export_tiny(longrope, tmp_path / "out", sequence_length=length, context_buckets=(length,))
    assert not (tmp_path / "out").exists()


def test_shorter_texts_are_exact(longrope: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"sequence_length": SHORT, "context_buckets": (SHORT,), "ctx_batch_size": 1}
    folder = export_tiny(longrope, tmp_path / "out", mixed_step=False, **sizes)
    prompt = torch.from_numpy(random_tokens(13))[None].long()
    options: dict[str, Any] = {"max_new_tokens": SHORT - 13, "do_sample": False, "eos_token_id": None}
    expected = AutoModelForCausalLM.from_pretrained(longrope).generate(prompt, **options)
    assert torch.equal(NeuronModelForCausalLM.from_pretrained(folder).generate(prompt, **options), expected)


def test_texts_of_every_length_may_have_the_frequencies_of_long_ones(longrope: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"sequence_length": 64, "context_buckets": (64,), "ctx_batch_size": 1}
    folder = export_tiny(longrope, tmp_path / "out", mixed_step=False, long_frequencies=True, **sizes)
    assert Artifact.open(folder).config.long_frequencies
    prompt = torch.from_numpy(random_tokens(SHORT + 8))[None].long()
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    own: Any = AutoModelForCausalLM.from_pretrained(longrope)
    found = NeuronModelForCausalLM.from_pretrained(folder)
    assert torch.equal(found.generate(prompt, **options), own.generate(prompt, **options))
    # A short text, too: what vLLM computes, and transformers does not.
    runner, words = artifact_runner(folder), random_tokens(13)
    logits = prefill_pieces(runner, 0, words, [8, 5])
    own.model.rotary_emb.original_inv_freq.copy_(LONG_FREQUENCIES)
    with torch.no_grad():
        expected = own(torch.from_numpy(words)[None].long(), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_long_frequencies_are_refused_where_there_are_none_or_none_are_needed(longrope: Path) -> None:
    model: Any = load_model(longrope)
    words = f"sequence_length={SHORT} it has other frequencies for longer texts only; leave out"
    with pytest.raises(ValueError, match=words):
        take_long_frequencies(model, SHORT)
    take_long_frequencies(model, SHORT + 1)
    assert torch.equal(model.model.rotary_emb.inv_freq, LONG_FREQUENCIES)
    check_text_length(model, 256)
    for rope in (DYNAMIC, {"rope_type": "default", "rope_theta": 1e4}):
        other: Any = AutoModelForCausalLM.from_config(LlamaConfig(**TINY_SIZES, rope_parameters=rope))
        with pytest.raises(ValueError, match="has no frequencies for long texts"):
            take_long_frequencies(other, 1000)


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_which_frequencies_a_graph_holds_depends_on_no_position(rope: dict[str, Any], tmp_path: Path) -> None:
    model: Any = load_model(save(rope, tmp_path))
    rotary = model.model.rotary_emb
    expected = rotary(torch.zeros(1), torch.arange(SHORT)[None])[0]
    check_text_length(model, SHORT)
    keep_frequencies(model)
    check_fixed_shapes(model, "cpu")
    config = tiny_config()
    export_graph(model, KVCache(state_specs(config, inspect_model(model))), graph_specs(config)[0])
    assert torch.equal(rotary(torch.zeros(1), torch.arange(SHORT)[None])[0], expected)
    assert torch.equal(rotary(torch.zeros(1), torch.arange(1000)[None])[0][:, :SHORT], expected)


def test_the_length_is_found_by_what_a_model_computes() -> None:
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**TINY_SIZES, rope_parameters=DYNAMIC))
    check_text_length(model, 256)
    with pytest.raises(ValueError, match=r"sequence_length=100000: .* at most 256$"):
        check_text_length(model, 100_000)
    check_text_length(model, 256)  # asking leaves nothing behind
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY_SIZES, rope_parameters=yarn))
    check_text_length(model, 256)
    keep_frequencies(model)
    assert model.model.rotary_emb.rope_type == "yarn"  # of one kind they stay as they are


def test_each_kind_of_layer_is_asked() -> None:
    ropes = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = Gemma3TextConfig(
        **TINY_SIZES, layer_types=["sliding_attention", "full_attention"], sliding_window=8, rope_parameters=ropes
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=f"at most {SHORT}, or give"):
        check_text_length(model, SHORT + 1)
    keep_frequencies(model)
    check_text_length(model, SHORT + 1)
    assert set(model.model.rotary_emb.rope_type.values()) == {"default"}
    # Positions of several kinds are asked alike.
    config = Qwen2_5_VLTextConfig(**TINY_SIZES, rope_parameters=LONGROPE | {"mrope_section": [2, 3, 3]})
    register_language_model(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    check_text_length(model, SHORT)
    with pytest.raises(ValueError, match=f"at most {SHORT}, or give"):
        check_text_length(model, SHORT + 1)


def test_a_module_that_counts_the_tokens_of_a_text_is_found_whatever_its_name() -> None:
    class Counting(nn.Module):
        def __init__(self, rotary: Any) -> None:
            super().__init__()
            self._forward = rotary.forward

        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            scale = 1.0 if position_ids.max() < SHORT else 2.0
            return tuple(part * scale for part in self._forward(x, position_ids))

    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**TINY_SIZES))
    model.model.rotary_emb = Counting(model.model.rotary_emb)
    with pytest.raises(ValueError, match=rf"model\.rotary_emb .* at most {SHORT}$"):
        check_text_length(model, 64)
