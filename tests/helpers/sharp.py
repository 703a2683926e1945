# SPDX-License-Identifier: Apache-2.0
"""Weights of tiny random models with which attention and routing decide."""

from __future__ import annotations

import zlib

import torch
from torch import nn
from transformers import PreTrainedModel


@torch.no_grad()
def sharpen(model: PreTrainedModel) -> None:
    """Weights with which attention and routing decide: freshly made ones attend to all tokens alike."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter += 0.2 * noise
        elif id(parameter) in embeddings:
            parameter.copy_(noise)
        else:
            query = any(part in name for part in ("q_proj", "q_b_proj", "query", "qkv", "Wqkv", "c_attn"))
            parameter.copy_(noise * (2.0 if query else 1.0) / parameter.shape[-1] ** 0.5)
