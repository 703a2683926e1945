# SPDX-License-Identifier: Apache-2.0
"""Tiny models with a recurrence of each kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
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


SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
LINEAR: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
DELTA: dict[str, Any] = SIZES | LINEAR | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8
}  # fmt: skip
SPACE: dict[str, Any] = SIZES | {"num_heads": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16, "expand": 2}
# One of each kind of recurrence.
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gated delta": lambda: Qwen3NextConfig(**DELTA, num_experts=0, decoder_sparse_step=1, mlp_only_layers=[0, 1]),
    "by channel": lambda: KimiLinearConfig(
        **SIZES | LINEAR | {"num_key_value_heads": 4}, linear_num_heads=4, linear_head_dim=16, mlp_layer_types=["dense"] * 2,
        kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    ),
    "state space": lambda: Mamba2Config(**SPACE, time_step_limit=(0.001, 0.5)),
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
    "qwen3_5_text": lambda: Qwen3_5TextConfig(**DELTA),
    # Without limits of the time step, which transformers applies to prompts and not to the tokens that follow.
    "mamba2": lambda: Mamba2Config(**SPACE),
    "nemotron_h": lambda: NemotronHConfig(
        **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"}, n_groups=2, ssm_state_size=8,
        layers_block_type=["mamba", "attention", "mlp"], mamba_num_heads=8, mamba_head_dim=16, chunk_size=16,
    ),
    "lfm2": lambda: Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
}  # fmt: skip


@cache
def model(kind: str) -> Any:
    torch.manual_seed(0)
    config = (CONFIGS | SERVED)[kind]()
    made = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    for name, parameter in made.named_parameters():
        if "norm" not in name and parameter.dim() > 1:
            parameter.data *= 4  # small random weights make nearly the same of all tokens
    return made.requires_grad_(False)
