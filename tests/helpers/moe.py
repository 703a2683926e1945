# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of models with experts, whose weights make routing and attention decide."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from tiny import TINY_CONFIGS, TINY_SIZES
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig

from optimum_neuron.step.features.experts.experts import set_experts


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: MixtralConfig(**TINY_SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **TINY_SIZES, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True
    ),
    # Biases, interleaved gates and transposed weights.
    "gpt_oss": TINY_CONFIGS["gpt_oss"],
    # Groups of experts, shared experts, and a dense layer.
    "deepseek_v3": TINY_CONFIGS["deepseek_v3"],
}


@torch.no_grad()
def make_model(name: str) -> PreTrainedModel:
    """Return a random float32 model with transformers' own attention and experts."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32, attn_implementation="eager").eval()
    for parameter_name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(parameter_name.encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter += 0.2 * noise
        else:
            parameter.copy_(noise if "embed" in parameter_name else 1.5 * noise / parameter.shape[-1] ** 0.5)
    set_experts(model, "eager")
    return model


def make_checkpoint(name: str, folder: Path) -> Path:
    make_model(name).save_pretrained(folder)
    return folder
