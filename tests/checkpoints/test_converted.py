# SPDX-License-Identifier: Apache-2.0
"""GGUF files by llama.cpp's converter are the models that they were made from, or are refused by a sentence that names the key.

In each checkpoint attention and positions decide, and its sizes and numbers are none that a class has by itself: a key that is
dropped shows.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import convert
from helpers import artifact_runner, export_tiny, generate
from sharp import sharpen
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from optimum_neuron.checkpoints.checkpoint import Checkpoint
from optimum_neuron.checkpoints.find import find_checkpoint
from optimum_neuron.step.features.codes.modules import weight_formats


TOKENS = 300
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": TOKENS, "max_position_embeddings": 256, "rms_norm_eps": 3e-4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def rope(kind: str = "default", theta: float = 12345.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def both_ropes(theta: float, near: float, **more: Any) -> dict[str, Any]:
    full, sliding = ({"rope_type": "default", "rope_theta": each} for each in (theta, near))
    return {"rope_parameters": {"full_attention": full | more, "sliding_attention": sliding}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0}
LONG = [1.0, 1.1, 1.3, 1.9, 2.5, 3.0, 4.0, 6.0]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXED = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip
SCALES = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 1.6}
# The converter leaves the base of their rotary embedding out, which is llama.cpp's in all published ones.
USUAL_BASE = rope(theta=10000.0)
FALCON = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 1, "vocab_size": TOKENS,
    "layer_norm_epsilon": 3e-4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "vocab_size": TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_ctx": 256,
    "layer_norm_epsilon": 3e-4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BLOOM = {
    "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": TOKENS, "layer_norm_epsilon": 3e-4, "pad_token_id": 0,
}  # fmt: skip
LINEAR = rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True) | {
    "head_dim": 16, "num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 3, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "full_attention_interval": 3, "mtp_num_hidden_layers": 1,
}  # fmt: skip
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 9}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
GEMMA_27B = {
    "num_hidden_layers": 46, "head_dim": 24, "query_pre_attn_scalar": 16, "sliding_window": 9, "hidden_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32,
}  # fmt: skip
ODD_LLAMA3 = {"factor": 5.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0, "original_max_position_embeddings": 48}


def longrope(short: list[float], long: list[float], original: int) -> dict[str, Any]:
    own = {"original_max_position_embeddings": original}
    return rope("longrope", short_factor=short, long_factor=long, **own) | own


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", rope()),
    "llama tied": ("llama", rope() | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama head_dim": ("llama", rope() | {"head_dim": 24}),
    "llama bias": ("llama", rope() | {"attention_bias": True, "mlp_bias": True}),
    "llama llama3": ("llama", rope("llama3", 500000.0, factor=8.0, **LLAMA3)),
    "llama llama3 short": ("llama", rope("llama3", 500.0, factor=32.0, **LLAMA3 | {"original_max_position_embeddings": 64})),
    "llama llama3 odd": ("llama", rope("llama3", 500.0, **ODD_LLAMA3)),
    "llama linear": ("llama", rope("linear", factor=3.5)),
    "llama yarn": ("llama", rope("yarn", **YARN)),
    "llama yarn attention": ("llama", rope("yarn", **YARN, attention_factor=0.8)),
    "mistral": ("mistral", rope() | {"head_dim": 24, "sliding_window": None}),
    "mixtral": ("mixtral", rope() | MIXED | {"head_dim": 24}),
    "qwen2": ("qwen2", rope()),
    "qwen2 yarn": ("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "qwen2 moe": ("qwen2_moe", rope() | EXPERTS | {"shared_expert_intermediate_size": 48}),
    "qwen3": ("qwen3", rope() | {"head_dim": 24}),
    "qwen3 bias": ("qwen3", rope("linear", factor=2.5) | {"head_dim": 16, "attention_bias": True}),
    "qwen3 moe": ("qwen3_moe", rope() | EXPERTS | {"head_dim": 24, "norm_topk_prob": True}),
    "qwen35": ("qwen3_5_text", LINEAR),
    "qwen35 moe": ("qwen3_5_moe_text", LINEAR | EXPERTS | {"shared_expert_intermediate_size": 48}),
    "phi3": ("phi3", rope() | {"sliding_window": None}),
    "phi3 window": ("phi3", rope() | {"sliding_window": 9}),
    "phi3 partial": ("phi3", rope(partial_rotary_factor=0.5) | {"sliding_window": 11}),
    "phi3 longrope": ("phi3", longrope([1.5] * 8, LONG, 64)),
    "phi3 longrope near": ("phi3", longrope(LONG, [2.0] * 8, 128) | {"sliding_window": 33}),
    "minimax-m2": ("minimax_m2",
        rope(partial_rotary_factor=0.5) | MIXED | {"head_dim": 24, "rotary_dim": 12, "scoring_func": "sigmoid"}),
    "gemma": ("gemma", USUAL_BASE | {"head_dim": 24}),
    "gemma2": ("gemma2", USUAL_BASE | GEMMA | CAPS),
    "gemma2 27b": ("gemma2", USUAL_BASE | GEMMA_27B),
    "gemma3": ("gemma3_text", both_ropes(54321.0, 777.0) | GEMMA | {"num_hidden_layers": 7}),
    "gemma3 linear": ("gemma3_text", both_ropes(54321.0, 777.0, rope_type="linear", factor=8.0) | GEMMA
        | {"num_hidden_layers": 7, "final_logit_softcapping": 3.0}),
    "stablelm": ("stablelm", rope(theta=10000.0, partial_rotary_factor=0.25) | {"layer_norm_eps": 3e-4}),
    "stablelm parallel": ("stablelm",
        rope(theta=10000.0, partial_rotary_factor=0.5) | {"use_qkv_bias": True, "use_parallel_residual": True}),
    "stablelm norms": ("stablelm", rope(theta=10000.0, partial_rotary_factor=0.5) | {"qk_layernorm": True}),
    "starcoder2": ("starcoder2", rope() | {"norm_epsilon": 3e-4}),
    "starcoder2 plain": ("starcoder2", rope() | {"use_bias": False, "tie_word_embeddings": False}),
    "gpt-oss": ("gpt_oss", rope("yarn", **YARN, truncate=False) | MIXED | {"head_dim": 24, "sliding_window": 9}),
    "gpt-oss published": ("gpt_oss", MIXED | {"head_dim": 16, "sliding_window": 9}),
    "deepseek2": ("deepseek_v2", rope() | LATENT),
    "deepseek2 lite": ("deepseek_v2", rope("yarn", **YARN, mscale=0.707, mscale_all_dim=0.707) | LATENT | {"q_lora_rank": None}),
    "deepseek2 groups": ("deepseek_v2", rope() | LATENT | {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}),
    "deepseek2 v3": ("deepseek_v3", rope("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0) | LATENT
        | {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "scoring_func": "sigmoid"}),
    "granite": ("granite", rope() | SCALES),
    "olmo2": ("olmo2", rope()),
    "olmo3": ("olmo3", both_ropes(54321.0, 54321.0) | {"num_hidden_layers": 5, "sliding_window": 9}),
    "falcon": ("falcon", FALCON),
    "falcon 40b": ("falcon", FALCON | {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon 11b": ("falcon", FALCON | {"num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    "bloom": ("bloom", BLOOM),
    "gpt2": ("gpt2", GPT2),
    "nemotron": ("nemotron", rope(partial_rotary_factor=0.5) | {"norm_eps": 3e-4}),
    "lfm2": ("lfm2", rope() | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}),
}  # fmt: skip
WITHOUT_SIZES = ("falcon", "bloom", "gpt2")
# Fields of configs that no logit depends on where nothing is trained.
UNCOMPUTED = {
    "initializer_range", "use_cache", "pretraining_tp", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    "attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "slow_but_exact", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout", "num_mtp_layers", "reorder_and_upcast_attn", "add_cross_attention", "block_multiple_of", "block_ffn_dim_multiplier",
}  # fmt: skip
# What a class makes of the other fields.
DERIVED = {"layer_types", "full_attn_idxs", "max_window_layers", "sliding_window"}


def make_model(title: str) -> PreTrainedModel:
    kind, changes = CASES[title]
    config = CONFIG_MAPPING[kind](**(changes if kind in WITHOUT_SIZES else SIZES | changes))
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    sharpen(model)
    return model


def write(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder / "checkpoint")
    # The converter cuts a Gemma's table to the tokens that this counts.
    vocabulary = {"model": {"vocab": {str(index): index for index in range(TOKENS)}}, "added_tokens": []}
    (folder / "checkpoint" / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    return convert(folder / "checkpoint", folder / "model.gguf", TOKENS, **options)


def open_file(path: Path) -> Checkpoint:
    return find_checkpoint(path, revision=None, token=None, trust_remote_code=False)


def tokens(count: int) -> torch.Tensor:
    return torch.randint(3, TOKENS, (1, count), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    names: set[str] = set()
    for kind in {CONFIG_MAPPING[kind] for kind, _ in CASES.values()}:

        def init(self: Any, *, made: Any = kind.__init__, **options: Any) -> None:
            names.update(options)
            made(self, **options)

        monkeypatch.setattr(kind, "__init__", init)
    return names


@pytest.mark.parametrize("title", CASES)
def test_a_file_is_the_model_that_it_was_made_from(title: str, given: set[str], tmp_path: Path) -> None:
    model = make_model(title)
    checkpoint = open_file(write(model, tmp_path))
    given.clear()
    config = checkpoint.load_config()
    own = {field.name for field in fields(type(config))} - {field.name for field in fields(PreTrainedConfig)}
    assert own - given - UNCOMPUTED - DERIVED == set()  # else the class decides, by one checkpoint's values
    loaded: Any = checkpoint.load_model("auto")
    # The same model with the attention of its class in transformers, which takes no cache.
    options: dict[str, Any] = {"config": loaded.config, "state_dict": loaded.state_dict(), "dtype": loaded.dtype}
    loaded = type(loaded).from_pretrained(None, attn_implementation="eager", **options).eval()
    with torch.no_grad():
        expected, found = (each(tokens(100)).logits for each in (model, loaded))
    assert (found - expected).abs().max() < 1e-5 * (expected.max() - expected.min())


EXPORTED = ("llama llama3", "qwen2 yarn", "phi3 partial", "gemma3", "gpt-oss", "deepseek2 lite")


@pytest.mark.parametrize("title", EXPORTED)
def test_an_artifact_of_a_file_answers_as_the_checkpoint_of_the_file(title: str, tmp_path: Path) -> None:
    model = make_model(title)
    artifact = export_tiny(write(model, tmp_path), tmp_path / "artifact")
    prompt = tokens(40)[0]
    answer, logits = generate(artifact_runner(artifact), prompt.numpy(), 5)
    with torch.no_grad():
        expected = model(torch.tensor([[*prompt.tolist(), *answer]])).logits[0, 39:-1]
    assert answer == expected.argmax(-1).tolist()
    assert (torch.as_tensor(logits) - expected).abs().max() < 2e-5 * (expected.max() - expected.min())


QUANTIZED = ("llama bias", "mixtral", "gpt-oss", "bloom", "granite", "stablelm norms")


@pytest.mark.parametrize("title", QUANTIZED)
def test_codes_are_kept_in_the_models_order(title: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = open_file(write(make_model(title), tmp_path, kind="MOSTLY_Q8_0")).load_model("auto")
    assert "exported as plain numbers" not in caplog.text  # nor is any other than the numbers that they stand for
    assert len(weight_formats(model)) >= 8
