# SPDX-License-Identifier: Apache-2.0
"""Tiny quantized checkpoints, written as the formats' own documents say, without the code that reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from optimum_neuron.checkpoints.formats.find import find_quantized
from optimum_neuron.checkpoints.formats.format import CheckpointFormat


LAYER = "model.layers.0.self_attn.q_proj"
WEIGHT = f"{LAYER}.weight"


def opened(folder: Path, tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> CheckpointFormat:
    """Writes tensors by name, and one plain tensor beside them; opens them by a config with this quantization."""
    plain = {"model.norm.weight": torch.ones(4)}
    save_file(
        {name: tensor.contiguous() for name, tensor in (plain | dict(tensors)).items()}, folder / "model.safetensors"
    )
    found = find_quantized({"model_type": "llama", "quantization_config": dict(quantization)}, folder, "tiny")
    assert found is not None
    return found


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes `[..., n]` in int32 words `[..., ceil(n * bits / 32)]`, each code above those before it."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % per_word))
    total = torch.zeros(*padded.shape[:-1], padded.shape[-1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        total += padded[..., place::per_word] * 2 ** (bits * place)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def whole(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    """Random whole numbers from `low` to `high`, both among them."""
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


def scales(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 1) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.1 + 1e-3).to(dtype)
