# SPDX-License-Identifier: Apache-2.0
"""From an artifact's folder back to a transformers model: its classes without memory, and tensors bound to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from .graphs.interface import ATTENTION_NAME, with_attention
from .graphs.text_length import keep_frequencies
from .text_part import register_language_model


def empty_model(folder: Path, dtype: str, *, trust_remote_code: bool) -> nn.Module:
    """The model of a folder's config.json without weights, to be filled by `assign`."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if not (trust_remote_code and hasattr(config, "auto_map")):
        register_language_model(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code}
    with torch.device("meta"):
        model = with_attention(
            lambda name: AutoModelForCausalLM.from_config(config, attn_implementation=name, **options), ATTENTION_NAME
        )
    keep_frequencies(model)
    return model.eval().requires_grad_(False)


def assign(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Binds tensors, named as in `weights.named_tensors`, to a model's parameters and buffers without copying.

    Names that share a tensor share a parameter: torch.export then gives it one input.

    Raises:
        ValueError: the model has a parameter or buffer that `tensors` lacks.
    """
    parameters: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for members in (module._parameters, module._buffers):
            for name, member in members.items():
                full = ".".join(part for part in ("model", prefix, name) if part)
                if member is None:
                    continue
                if full not in tensors:
                    raise ValueError(f"the artifact's weights lack {full}; export the model again")
                tensor = tensors[full]
                if isinstance(member, nn.Parameter):
                    members[name] = parameters.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=False))
                else:
                    members[name] = tensor
