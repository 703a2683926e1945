# SPDX-License-Identifier: Apache-2.0
"""What vLLM asks of a model class. Its own modelling code is never run: the compiled graphs are the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class NeuronCausalLM(nn.Module):
    """Stands for a model whose modelling code is transformers': vLLM asks its type only.

    The methods are those by which vLLM recognises a text generation model.
    """

    def __init__(self, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        raise RuntimeError("compiled graphs are run by the worker of this plugin; vLLM builds no model")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the embedding is inside the compiled graphs")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        raise RuntimeError("the layers are inside the compiled graphs")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the head is inside the compiled graphs")


def register_architectures() -> None:
    """Registers every causal language model of transformers, also where vLLM has code for it: to ask that for its type would import
    it, with what it needs of packages and devices."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm import ModelRegistry

    for architecture in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())):
        ModelRegistry.register_model(architecture, f"{__name__}:NeuronCausalLM")


def restore_configs() -> None:
    """Has vLLM read configs of transformers' causal language models as transformers does, which wrote the artifact's: classes that vLLM has
    for its own modelling code refuse some, and it looks for several sets of rotary parameters under types of layers alone.
    DeepSeek-V4's fails either way."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.transformers_utils import config

    for model_type in config._CONFIG_REGISTRY.keys() & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys():
        del config._CONFIG_REGISTRY[model_type]
    config.is_rope_parameters_nested = _has_sets_by_name


def _has_sets_by_name(rope_parameters: dict[str, Any]) -> bool:
    """Whether rotary parameters are several sets, each under a name."""
    return bool(rope_parameters) and all(
        value is None or isinstance(value, dict) for value in rope_parameters.values()
    )
