# SPDX-License-Identifier: Apache-2.0
"""The sizes of tiny models, and one config of each kind of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)


TINY_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Windows shorter than the prompts of the tests, so that a wrong mask shows.
TINY_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**TINY_SIZES),
    "qwen3": lambda: Qwen3Config(**TINY_SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "gemma2": lambda: Gemma2Config(**TINY_SIZES, sliding_window=8),
    "gpt_oss": lambda: GptOssConfig(
        **TINY_SIZES,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    # Latent attention: keys are wider than values; its own attention needs as many heads of both.
    "deepseek_v3": lambda: DeepseekV3Config(
        **TINY_SIZES | {"num_key_value_heads": 4, "head_dim": 8},
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
    ),
    "lfm2": lambda: Lfm2Config(
        **TINY_SIZES | {"num_hidden_layers": 4},
        layer_types=["conv", "conv", "full_attention", "conv"],
        conv_L_cache=4,
        conv_bias=True,
    ),
}
