# SPDX-License-Identifier: Apache-2.0
"""Tiny configs of transformers' causal language models, made by rule from the names of config attributes."""

from __future__ import annotations

import copy
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


# Our own class is in the mapping too, and has no config of its own.
ARCHITECTURES = tuple(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)
VOCAB, LAYERS, WINDOW, POSITIONS = 256, 4, 8, 256

# Sizes by the name of the attribute. An attribute_map leads other names (n_embd, d_model, ...) to the same rules.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts")
SIZES: dict[str, int] = (
    dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "emb_dim", "embedding_size"), 64)
    | dict.fromkeys(("input_embedding_size", "output_embedding_size", "embedding_dim", "lru_width"), 64)
    | dict.fromkeys(("attention_hidden_size", "linear_kv_dim"), 64)
    | dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_hidden_size", "ffn_dim", "decoder_ffn_dim"), 96)
    | dict.fromkeys(("n_inner", "dff", "d_inner", "dim_ff", "feed_forward_size", "dense_intermediate_size"), 96)
    | dict.fromkeys(("prefix_dense_intermediate_size",), 96)
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks"), LAYERS)
    | dict.fromkeys(("num_decoder_layers", "encoder_layers", "num_encoder_layers", "num_layers_per_stack"), LAYERS)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4)
    | dict.fromkeys(("num_decoder_attention_heads", "swa_num_attention_heads", "attention_heads"), 4)
    | dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads"), 4)
    | dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2)
    | dict.fromkeys(("num_global_key_value_heads", "num_query_groups"), 2)
    | dict.fromkeys(("head_dim", "dim_head", "d_head", "swa_head_dim", "global_head_dim", "attention_head_size"), 16)
    | dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim"), 16)
    | dict.fromkeys(("mamba_d_head", "mamba_headdim", "attention_head_dim"), 16)
    | dict.fromkeys(("rotary_dim",), 8)
    | dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads"), 4)
    | dict.fromkeys(("mamba_n_heads", "n_mamba_heads"), 8)
    | dict.fromkeys(("vocab_size", "n_tokens", "vocab_size_per_layer_input", "decoder_vocab_size"), VOCAB)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), POSITIONS)
    | dict.fromkeys(("max_target_positions", "context_length", "original_max_position_embeddings"), POSITIONS)
    | dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "local_attention"), WINDOW)
    | dict.fromkeys(("attention_window_size", "swa_window_size", "attention_chunk_size"), WINDOW)
    | dict.fromkeys(("keep_window_size", "floor_scale", "rel_extent", "local_attn_chunk_length"), WINDOW)
    | dict.fromkeys(EXPERT_COUNTS, 4)
    | dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2)
    | dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1)
    | dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32)
    | dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size", "router_hidden_size"), 32)
    | dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers"), 1)
    | dict.fromkeys(("zero_expert_num", "max_window_layers", "num_kv_shared_layers"), 2)
    | dict.fromkeys(("moe_layer_start_index",), 1)
    | dict.fromkeys(("moe_layer_end_index",), LAYERS - 1)
    # Latent attention: keys and values of different sizes.
    | {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
    | {"o_lora_rank": 16, "o_groups": 2, "hc_lowrank": 8, "laurel_rank": 8, "hidden_size_per_layer_input": 8}
    | {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2}
    | {"mamba_d_state": 8, "state_size": 8, "ssm_state_size": 8, "time_step_rank": 4, "mamba_d_ssm": 128}
    | {"mamba_chunk_size": 8, "chunk_size": 8, "num_mel_bins": 8, "d_rel": 8, "adapter_rank": 8}
)  # fmt: skip
# Values that switch on what an architecture has, or that a causal language model needs.
VALUES: dict[str, Any] = {
    "is_decoder": True, "use_sliding_window": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16, "axial_pos_embds": False, "mamba_expand": 2, "use_cache": True,
}  # fmt: skip
# Where the names tell too little: the attribute means something else here, or sizes depend on each other.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_TEXT_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip
_TEXT_OF_ASSISTANT = {name: SIZES[name] for name in _TEXT_SIZES} | {
    "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": LAYERS,
}  # fmt: skip
_T5 = {"model_type": "t5", "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 2, "vocab_size": VOCAB}
_ENCODEC = {"model_type": "encodec", "num_filters": 4, "hidden_size": 16, "codebook_size": 64, "num_lstm_layers": 1}
_MUSIC = {
    "text_encoder": _T5,
    "audio_encoder": _ENCODEC,
    "decoder": {
        "model_type": "musicgen_decoder", "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": VOCAB,
    },
}  # fmt: skip
OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {
        "patch_size": 4,
        "encoder_hash_byte_group_vocab": 64,
        **{
            f"{part}_config": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 260}
            for part in ("patcher", "encoder", "decoder", "global")
        },
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": dict.fromkeys(
            ("sliding_attention", "full_attention"), _ROPE | {"mrope_section": [3, 3, 2]}
        ),
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "gemma4_assistant": {"backbone_hidden_size": 64, "num_centroids": 8, "text_config": _TEXT_OF_ASSISTANT},
    "gemma4_unified_assistant": {
        "backbone_hidden_size": 64,
        "num_centroids": 8,
        "text_config": _TEXT_OF_ASSISTANT | {"model_type": "gemma4_unified_text"},
    },
    "kimi_linear": {"num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "musicgen": _MUSIC,
    "musicgen_melody": _MUSIC,
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 2},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
    | {"indexer_compress_ratio": 4, "ngram_vocab_size_base": 64, "split_ngram_parts": 1},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(name: str) -> PreTrainedConfig:
    """A small config of a model type, with every kind of layer that its default config has."""
    config_class = CONFIG_MAPPING[name]
    overrides = copy.deepcopy(OVERRIDES.get(name, {}))  # configs take their parts out of what they are given
    try:
        default = config_class()
    except StrictDataclassError:  # its parts have no defaults
        return config_class(**overrides)
    return config_class(**tiny_options(default, overrides))


def tiny_options(default: PreTrainedConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    """What to change of a default config, by the names of its attributes; `overrides` come last."""
    options: dict[str, Any] = {}
    depth = getattr(default, "num_hidden_layers", None)
    for key, value in default.to_dict().items():
        if key in default.sub_configs:
            sub = getattr(default, key, None)
            if isinstance(sub, PreTrainedConfig):
                options[key] = tiny_options(sub, OVERRIDES.get(sub.model_type, {}))
        elif key in VALUES:
            options[key] = VALUES[key] if value is not None or key not in _ONLY_IF_SET else None
        elif isinstance(value, list) and value and len(value) == depth:
            kinds = list(dict.fromkeys(map(_hashable, value)))
            if kinds == ["full_attention"] and "sliding_window" in default.to_dict():
                kinds = ["sliding_attention", "full_attention"]
            options[key] = [kinds[index % len(kinds)] for index in range(LAYERS)]
        elif key in SIZES and not isinstance(value, (list, dict)):
            options[key] = SIZES[key] if value is not None or key not in _ONLY_IF_SET else None
    if "qk_rope_head_dim" in options:  # latent attention: keys and values are made for every head
        options |= {"num_key_value_heads": options["num_attention_heads"], "head_dim": options["qk_rope_head_dim"]}
    return options | overrides


_ONLY_IF_SET = {"attn_logit_softcapping", "final_logit_softcapping", "num_experts", "sliding_window_size"}


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
