# SPDX-License-Identifier: Apache-2.0
"""Models of random weights in the shapes of published ones: how fast a step is depends on no weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, NemotronHConfig, PreTrainedConfig, Qwen3_5TextConfig

from optimum_neuron.artifact.partial import partial_folder


_NO_TEXT: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_LAYERS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
# For a run that only tells whether all works.
_QUICK_VOCABULARY = 2048


def qwen3_5(quick: bool) -> PreTrainedConfig:
    """Return Qwen3.5-0.8B's text model; quick, its first layers and a small vocabulary."""
    return Qwen3_5TextConfig(
        **_NO_TEXT,
        vocab_size=_QUICK_VOCABULARY if quick else 248320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=4 if quick else 24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
    )


def nemotron_h(quick: bool) -> PreTrainedConfig:
    """Return Nemotron-H-8B, a quarter as wide and half as deep; quick, its first layers and a small vocabulary."""
    return NemotronHConfig(
        **_NO_TEXT,
        vocab_size=_QUICK_VOCABULARY if quick else 131072,
        hidden_size=1024,
        intermediate_size=5376,
        layers_block_type=[_LAYERS[each] for each in ("M-M*-" if quick else "M-M-M-M*-M-M-M-M-M*-M-M-M-")],
        num_attention_heads=8,
        num_key_value_heads=2,
        mamba_num_heads=32,
    )


CONFIGS = {"qwen3.5": qwen3_5, "nemotron-h": nemotron_h}


def checkpoint(name: str, folder: Path, *, quick: bool) -> Path:
    """Return a checkpoint of a shape in bfloat16, made where the folder has none yet."""
    path = folder / f"{name}{'-quick' if quick else ''}"
    if not path.is_dir():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name](quick), dtype=torch.bfloat16)
        folder.mkdir(parents=True, exist_ok=True)
        with partial_folder(folder, path.name) as unfinished:
            model.save_pretrained(unfinished / path.name)
            (unfinished / path.name).rename(path)
    return path
