# SPDX-License-Identifier: Apache-2.0
"""Adapters for the tests, made on the spot, and exports that merge them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from helpers import tiny_config
from transformers import AutoModelForCausalLM

from optimum_neuron import export_model


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def lora(**changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "target_modules": ATTENTION, "init_lora_weights": False} | changes)


def make_adapter(checkpoint: Path, folder: Path, config: peft.PeftConfig, *, rows: int | None = None) -> Path:
    """An adapter as training leaves it, but with random numbers; `rows`: trained with so many embeddings."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data += 0.1 * torch.randn_like(parameter)
        assert parameter.isfinite().all(), name
    adapted.save_pretrained(folder)
    return folder


def export(checkpoint: Path, output: Path, adapter: Any, **changes: Any) -> Path:
    return export_model(checkpoint, output, config=tiny_config(**changes), adapter=adapter)
