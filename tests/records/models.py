# SPDX-License-Identifier: Apache-2.0
"""Twelve tiny models, with at least one for each kind of state and weight. Their weights are small fractions of integers.

Sums of such numbers are exact in float32, so that a merged adapter has the same bits on every instruction set.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from adapting import lora
from architectures.configs import tiny_config
from tiny import TINY_CONFIGS
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig


OF_TYPES = ("deepseek_v2", "deepseek_v4", "qwen3_next", "nemotron_h", "minimax", "bloom")


@dataclass(frozen=True)
class TinyModel:
    """A model, the options of its export, and whether this merges an adapter."""

    config: Callable[[], PreTrainedConfig]
    options: dict[str, Any] = field(default_factory=dict)
    adapted: bool = False

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the checkpoint, and the adapter if there is one; return the arguments of `export_model` that name them."""
        model = AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)
        fill(model)
        model.save_pretrained(folder / "checkpoint")
        if self.adapted:
            adapter = peft.get_peft_model(model, lora())
            fill(adapter)
            adapter.save_pretrained(folder / "adapter")
        return {"model": folder / "checkpoint", **({"adapter": folder / "adapter"} if self.adapted else {})}


MODELS: dict[str, TinyModel] = {
    **{name: TinyModel(TINY_CONFIGS[name]) for name in ("llama", "gpt_oss", "lfm2")},
    "gemma3": TinyModel(partial(tiny_config, "gemma3_text")),
    **{name: TinyModel(partial(tiny_config, name)) for name in OF_TYPES},
    "quantized": TinyModel(
        TINY_CONFIGS["llama"], {"quantization": "int4", "quantization_group_size": 32, "activations": "none"}
    ),
    "adapter": TinyModel(TINY_CONFIGS["llama"], adapted=True),
}


def fill(model: nn.Module) -> None:
    """Set each parameter to fractions of integers that follow from its name and shape."""
    for name, parameter in model.named_parameters():
        # numpy promises that RandomState's numbers stay as they are.
        draws = np.random.RandomState(zlib.crc32(name.encode())).randint(-64, 65, tuple(parameter.shape))
        offset = 1.0 if parameter.dim() == 1 and "norm" in name else 0.0
        parameter.data = torch.from_numpy(draws).float() / 256 + offset
