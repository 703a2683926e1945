# SPDX-License-Identifier: Apache-2.0
"""Tiny models as graphs are made of them, and how to get them with more layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from optimum_neuron.parity.text_length import keep_frequencies
from optimum_neuron.step.interface import ATTENTION_NAME, with_attention

from . import configs


# Layers that are all the same, of two kinds in turn, with experts, with convolutions, and different at the beginning.
KINDS_OF_LAYERS = ("llama", "gemma3_text", "gpt_oss", "lfm2", "deepseek_v3")


def graph_model(name: str, dtype: torch.dtype) -> Any:
    """A randomly initialized model with this project's attention."""
    config = configs.tiny_config(name)
    torch.manual_seed(0)
    model = with_attention(
        lambda attention: AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation=attention
        ),
        ATTENTION_NAME,
    )
    keep_frequencies(model)
    return model.eval().requires_grad_(False)


def deepen(patch: pytest.MonkeyPatch) -> None:
    """Doubles the layers of `tiny_config`, so that of two kinds in turn some are left out of a trace."""
    layers = 2 * configs.LAYERS
    patch.setattr(configs, "LAYERS", layers)
    for key, value in configs.SIZES.items():
        if 2 * value == layers and ("layer" in key or key == "num_blocks"):
            patch.setitem(configs.SIZES, key, layers)
    for name, options in configs.OVERRIDES.items():
        if "layer_types" in options:
            patch.setitem(configs.OVERRIDES, name, options | {"layer_types": options["layer_types"] * 2})
