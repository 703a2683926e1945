# SPDX-License-Identifier: Apache-2.0
"""A key of config.json that says how a model computes, and that its transformers class does not read, is named; no other is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import export_tiny
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from optimum_neuron.checkpoints.unread import _COMPUTES, _HARMLESS, unread_keys


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
LLAMA3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
# Of published config.json files, what is said of computing, and what is not and looks like it.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 3.1": {"model_type": "llama", "attention_bias": False, "mlp_bias": False, "rope_theta": 500000.0, "rope_scaling": LLAMA3,
                  "max_position_embeddings": 131072, "torch_dtype": "bfloat16"},
    "Qwen2.5": {"model_type": "qwen2", "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "rope_theta": 1e6,
                "use_mrope": False, "rope_scaling": YARN, "tie_word_embeddings": True, "attention_dropout": 0.0},
    "Gemma 2": {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid",
                "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
                "sliding_window": 4096, "sliding_window_size": 4096, "head_dim": 256, "rope_theta": 10000.0},
    "Gemma 3": {"model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 512,
                "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_theta": 1000000, "sliding_window_pattern": 6,
                "hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid",
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "Phi 3": {"model_type": "phi3", "original_max_position_embeddings": 4096, "max_position_embeddings": 131072, "sliding_window": 262144,
              "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"}, "embd_pdrop": 0.0,
              "hidden_size": 3072, "num_attention_heads": 32, "attention_bias": False, "resid_pdrop": 0.0},
    "Phi 4 mini": {"model_type": "phi3", "original_max_position_embeddings": 4096, "max_position_embeddings": 131072, "lm_head_bias": False,
                   "partial_rotary_factor": 0.75, "full_attn_mod": 1, "interpolate_factor": 1, "mlp_bias": False, "sliding_window": 262144,
                   "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
                   "hidden_size": 3072, "num_attention_heads": 24},
    "gpt-oss": {"model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
                "initial_context_length": 4096, "sliding_window": 128, "router_aux_loss_coef": 0.9, "rope_theta": 150000,
                "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                                 "rope_type": "yarn", "truncate": False}},
    "DeepSeek V2": {"model_type": "deepseek_v2", "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
                    "n_group": 1, "scoring_func": "softmax", "seq_aux": True, "topk_method": "greedy", "norm_topk_prob": False,
                    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                                     "original_max_position_embeddings": 4096, "type": "yarn"}},
    "DeepSeek V3": {"model_type": "deepseek_v3", "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1,
                    "n_group": 8, "topk_group": 4, "num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
                    "routed_scaling_factor": 2.5, "seq_aux": True, "norm_topk_prob": True,
                    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                                     "original_max_position_embeddings": 4096, "type": "yarn"}},
    "GLM 4.5": {"model_type": "glm4_moe", "n_routed_experts": 160, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "topk_group": 1,
                "use_qk_norm": True, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1, "first_k_dense_replace": 3},
    "Falcon": {"model_type": "falcon", "alibi": False, "apply_residual_connection_post_layernorm": False, "bias": False, "multi_query": True,
               "new_decoder_architecture": False, "parallel_attn": True, "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5},
    "BLOOM": {"model_type": "bloom", "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "masked_softmax_fusion": True,
              "n_head": 16, "n_inner": None, "n_layer": 24, "offset_alibi": 100, "seq_length": 2048, "skip_bias_add": True,
              "skip_bias_add_qkv": False, "apply_residual_connection_post_layernorm": False, "pretraining_tp": 1},
    "StarCoder2": {"model_type": "starcoder2", "activation_function": "gelu", "attention_softmax_in_fp32": True, "norm_epsilon": 1e-5,
                   "layer_norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "mlp_type": "default", "norm_type": "layer_norm",
                   "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "sliding_window": 4096, "use_bias": True},
    "Cohere 2": {"model_type": "cohere2", "cache_implementation": "hybrid", "layer_switch": 4, "logit_scale": 0.25, "rotary_pct": 1.0,
                 "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "sliding_window_pattern": 4,
                 "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": False},
    "GPT-J": {"model_type": "gptj", "rotary": True, "rotary_dim": 64, "scale_attn_weights": True, "summary_type": "cls_index"},
    "Mamba": {"model_type": "mamba", "d_inner": 1536, "fused_add_norm": True, "pad_vocab_size_multiple": 8, "rms_norm": True,
              "rescale_prenorm_residual": False, "residual_in_fp32": True, "ssm_cfg": {}, "conv_kernel": 4, "time_step_rank": 48},
}  # fmt: skip


def read(document: dict[str, Any]) -> dict[str, Any]:
    config: PreTrainedConfig = CONFIG_MAPPING[document["model_type"]].from_dict(json.loads(json.dumps(document)))
    return unread_keys(document, config)


@pytest.mark.parametrize("family", PUBLISHED)
def test_of_published_configs_no_key_is_named(family: str) -> None:
    more = {"architectures": ["X"], "use_cache": True, "transformers_version": "4.40.0"}
    assert read(PUBLISHED[family] | more) == {}


LINEAR = {"rope_type": "linear", "factor": 4.0}
ODD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a window": ({"sliding_window": 4096, "max_position_embeddings": 4096}, {"sliding_window": 4096}),
    "soft caps": ({"attn_logit_softcapping": 50.0, "logit_cap": 30.0}, {"attn_logit_softcapping": 50.0, "logit_cap": 30.0}),
    "scales": ({"logit_scale": 0.5, "embedding_multiplier": 12, "scale_emb": 12, "residual_multiplier": 1.0}, {
        "logit_scale": 0.5, "embedding_multiplier": 12, "scale_emb": 12}),
    "heads": ({"num_attention_heads": 16, "num_heads": 12}, {"num_heads": 12}),
    "another epsilon": ({"rms_norm_eps": 1e-5, "layer_norm_epsilon": 1e-6}, {"layer_norm_epsilon": 1e-6}),
    "another activation": ({"hidden_act": "silu", "hidden_activation": "gelu"}, {"hidden_activation": "gelu"}),
    "a part of heads": ({"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5}),
    "a member of rope": ({"rope_scaling": LINEAR | {"attn_factor": 0.5}}, {"rope_scaling.attn_factor": 0.5}),
    "a part in rope": ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, {"rope_parameters.partial_rotary_factor": 0.5}),
    "two bases": ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, {"rope_theta": 5e5}),
    "two ropes": ({"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 8.0}}, {"rope_parameters.factor": 8.0}),
    "types that contradict": ({"rope_scaling": LINEAR | {"type": "dynamic"}}, {"rope_scaling.type": "dynamic"}),
    "a list for a type": ({"rope_scaling": LINEAR | {"type": ["linear"]}}, {"rope_scaling.type": ["linear"]}),
    "a misspelled rope": ({"rope_scale": LINEAR}, {"rope_scale": LINEAR}),
    "experts": ({"num_local_experts": 8, "num_experts_per_tok": 2}, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "alibi": ({"use_alibi": True, "use_qk_norm": True, "alibi": False}, {"use_alibi": True, "use_qk_norm": True}),
    "other heads": ({"model_type": "gpt2", "head_dim": 7, "num_key_value_heads": 2}, {"head_dim": 7, "num_key_value_heads": 2}),
    "rope of a model without": ({"model_type": "gpt2", "rope_scaling": LINEAR}, {
        "rope_scaling.rope_type": "linear", "rope_scaling.factor": 4.0}),
    "scores": ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, {"scoring_func": "softmax"}),
    "chunks": ({"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 262144}}, {
        "dual_chunk_attention_config": {"chunk_size": 262144}}),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_a_key_that_a_class_does_not_read_is_named(odd: str) -> None:
    document, named = ODD[odd]
    assert read({"model_type": "llama"} | document) == named


def test_keys_by_which_any_other_class_computes_are_named_for_llama() -> None:
    """The vocabulary holds the keys of all causal language models of transformers."""
    own = {*CONFIG_MAPPING["llama"].__dataclass_fields__, *CONFIG_MAPPING["llama"].attribute_map}
    own |= {"rope_scaling", "rope_theta", "layer_types"}
    kinds = [CONFIG_MAPPING[kind] for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING]
    names = {name for kind in kinds for name in kind.__dataclass_fields__}
    computing = {name for name in names - own if _COMPUTES.search(name) and not _HARMLESS.search(name)}
    assert len(computing) > 250
    assert read({"model_type": "llama"} | dict.fromkeys(computing, 0.37)).keys() == computing


def test_what_is_unread_is_named_once(tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"sliding_window": 8, "logit_scale": 0.5}))
    export_tiny(folder, tmp_path / "artifact")
    (line,) = [record.getMessage() for record in caplog.records if "does not read" in record.getMessage()]
    assert "its config.json says sliding_window=8, logit_scale=0.5, which LlamaConfig does not read" in line
