# SPDX-License-Identifier: Apache-2.0
"""Tiny models with a recurrence of each kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from tiny import TINY_SIZES
from transformers import (
    AutoModelForCausalLM,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Mamba2Config,
    MiniMaxConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)

from optimum_neuron.step.interface import ATTENTION_NAME


SIZES: dict[str, Any] = {name: size for name, size in TINY_SIZES.items() if name != "max_position_embeddings"}
SIZES["eos_token_id"] = None
LINEAR: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
_GATED: dict[str, Any] = LINEAR | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
# One of each kind of recurrence.
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gated delta": lambda: Qwen3NextConfig(
        **SIZES,
        **_GATED,
        num_experts=0,
        decoder_sparse_step=1,
        mlp_only_layers=[0, 1],
    ),
    "by channel": lambda: KimiLinearConfig(
        **SIZES | {"num_key_value_heads": 4},
        **LINEAR,
        linear_num_heads=4,
        linear_head_dim=16,
        mlp_layer_types=["dense", "dense"],
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
    "state space": lambda: Mamba2Config(
        **SIZES, num_heads=8, state_size=8, n_groups=2, chunk_size=16, expand=2, time_step_limit=(0.001, 0.5)
    ),
    "selective": lambda: JambaConfig(
        **SIZES, mamba_d_state=8, mamba_expand=2, mamba_dt_rank=8, attn_layer_period=2, attn_layer_offset=1,
        num_experts=1, num_experts_per_tok=1,
    ),
    "lightning": lambda: MiniMaxConfig(**SIZES, **LINEAR, num_local_experts=1, num_experts_per_tok=1, block_size=16),
    "vectors": lambda: RecurrentGemmaConfig(
        **SIZES, lru_width=64, attention_window_size=40, block_types=("recurrent", "attention")
    ),
}  # fmt: skip
# Whole models, as they are served: with attention or without, with recurrences, with convolutions, with both.
SERVED: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_5_text": lambda: Qwen3_5TextConfig(**SIZES, **_GATED),
    # Without limits of the time step, which transformers applies to prompts and not to the tokens that follow.
    "mamba2": lambda: Mamba2Config(**SIZES, num_heads=8, state_size=8, n_groups=2, chunk_size=16, expand=2),
    "nemotron_h": lambda: NemotronHConfig(
        **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"},
        layers_block_type=["mamba", "attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=8,
        chunk_size=16,
    ),
    "lfm2": lambda: Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
}


@cache
def model(kind: str) -> Any:
    torch.manual_seed(0)
    config = (CONFIGS | SERVED)[kind]()
    made = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    for name, parameter in made.named_parameters():
        if "norm" not in name and parameter.dim() > 1:
            parameter.data *= 4  # small random weights make nearly the same of all tokens
    return made.requires_grad_(False)
