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
_NAMES_BY_SIZE = {
    64: "hidden_size n_embd d_model word_embed_proj_dim emb_dim embedding_size input_embedding_size output_embedding_size embedding_dim "
        "lru_width attention_hidden_size linear_kv_dim",
    96: "intermediate_size intermediate_size_mlp ffn_hidden_size ffn_dim decoder_ffn_dim n_inner dff d_inner dim_ff feed_forward_size "
        "dense_intermediate_size prefix_dense_intermediate_size",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_blocks num_decoder_layers encoder_layers num_encoder_layers "
        "num_layers_per_stack num_attention_heads n_head n_heads num_heads decoder_attention_heads num_decoder_attention_heads "
        "swa_num_attention_heads attention_heads encoder_attention_heads num_encoder_attention_heads linear_num_heads linear_num_key_heads "
        "linear_num_value_heads mamba_num_heads time_step_rank index_topk index_block_size " + " ".join(EXPERT_COUNTS),
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads num_query_groups num_experts_per_tok "
        "num_experts_per_token moe_topk moe_k top_k_experts zero_expert_num max_window_layers num_kv_shared_layers o_groups index_n_heads "
        "index_topk_blocks",
    16: "head_dim dim_head d_head swa_head_dim global_head_dim attention_head_size linear_head_dim linear_key_head_dim "
        "linear_value_head_dim mamba_head_dim mamba_d_head mamba_headdim attention_head_dim kv_lora_rank qk_nope_head_dim o_lora_rank "
        "index_head_dim",
    VOCAB: "vocab_size n_tokens vocab_size_per_layer_input decoder_vocab_size max_position_embeddings n_positions n_ctx max_seq_len seq_length "
        "max_target_positions context_length original_max_position_embeddings",
    WINDOW: "sliding_window sliding_window_size window_size local_attention attention_window_size swa_window_size attention_chunk_size "
        "keep_window_size floor_scale rel_extent local_attn_chunk_length rotary_dim mamba_n_heads n_mamba_heads qk_rope_head_dim hc_lowrank "
        "laurel_rank hidden_size_per_layer_input mamba_d_state state_size ssm_state_size mamba_chunk_size chunk_size num_mel_bins d_rel "
        "adapter_rank",
    32: "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
        "shared_intermediate_size router_hidden_size",
    1: "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group num_expert_group first_k_dense_replace "
        "num_dense_layers moe_layer_start_index",
    LAYERS - 1: "moe_layer_end_index",
    # Of latent attention and of Mamba: keys and values of different sizes, and more channels than the hidden size has.
    24: "q_lora_rank", 12: "v_head_dim", 128: "mamba_d_ssm",
}  # fmt: skip
SIZES: dict[str, int] = {name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()}
# Values that switch on what an architecture has, or that a causal language model needs.
VALUES: dict[str, Any] = {
    "is_decoder": True, "use_sliding_window": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16, "axial_pos_embds": False, "mamba_expand": 2, "use_cache": True,
}  # fmt: skip
_ONLY_IF_SET = {"attn_logit_softcapping", "final_logit_softcapping", "num_experts", "sliding_window_size"}
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
_DECODER = {
    "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": VOCAB,
}  # fmt: skip
_MUSIC = {"text_encoder": _T5, "audio_encoder": _ENCODEC, "decoder": {"model_type": "musicgen_decoder"} | _DECODER}
_BLT = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 260}
_BOTH = ("sliding_attention", "full_attention")
OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"patch_size": 4, "encoder_hash_byte_group_vocab": 64}
    | {f"{part}_config": _BLT for part in ("patcher", "encoder", "decoder", "global")},
    "cohere_compass_text": {
        "layer_types": [*_BOTH] * 2, "rope_parameters": dict.fromkeys(_BOTH, _ROPE | {"mrope_section": [3, 3, 2]}),
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "gemma4_assistant": {"backbone_hidden_size": 64, "num_centroids": 8, "text_config": _TEXT_OF_ASSISTANT},
    "gemma4_unified_assistant": {
        "backbone_hidden_size": 64, "num_centroids": 8,
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
}  # fmt: skip


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
            kinds = list(dict.fromkeys(tuple(each) if isinstance(each, list) else each for each in value))
            if kinds == ["full_attention"] and "sliding_window" in default.to_dict():
                kinds = ["sliding_attention", "full_attention"]
            options[key] = [kinds[index % len(kinds)] for index in range(LAYERS)]
        elif key in SIZES and not isinstance(value, (list, dict)):
            options[key] = SIZES[key] if value is not None or key not in _ONLY_IF_SET else None
    if "qk_rope_head_dim" in options:  # latent attention: keys and values are made for every head
        options |= {"num_key_value_heads": options["num_attention_heads"], "head_dim": options["qk_rope_head_dim"]}
    return options | overrides
