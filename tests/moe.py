# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of models with experts, whose weights make routing and attention decide."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from tiny import TINY_CONFIGS, TINY_SIZES
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig


_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**TINY_SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **TINY_SIZES, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True
    ),
    # Biases, interleaved gates and transposed weights.
    "gpt_oss": TINY_CONFIGS["gpt_oss"],
    # Groups of experts, shared experts, and a dense layer.
    "deepseek_v3": lambda: DeepseekV3Config(
        **TINY_SIZES | _LATENT | {"num_key_value_heads": 4, "head_dim": 8},
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}


@torch.no_grad()
def make_checkpoint(name: str, folder: Path) -> Path:
    """Writes a random float32 checkpoint."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(parameter_name.encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter += 0.2 * noise
        else:
            parameter.copy_(noise if "embed" in parameter_name else 1.5 * noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder
