# SPDX-License-Identifier: Apache-2.0
"""Changes of vLLM and torch for a whole process: each once, here, with the reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import ModelRegistry
from vllm.engine.arg_utils import EngineArgs
from vllm.transformers_utils import config

from .options import watch_arguments


class NeuronCausalLM(nn.Module):
    """A stand-in for a model with modelling code in transformers: vLLM asks its type only, and recognises it by its methods."""

    def __init__(self, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        raise RuntimeError("compiled graphs are run by the worker of this plugin; vLLM builds no model")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the embedding is inside the compiled graphs")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        raise RuntimeError("the layers are inside the compiled graphs")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the head is inside the compiled graphs")


def patch_process() -> None:
    """Make all changes, before vLLM makes a configuration. To be called once in a process, as vLLM calls its plugins."""
    # vLLM imports the code that it has for an architecture to learn its type, with what that needs of packages and devices.
    for architecture in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())):
        ModelRegistry.register_model(architecture, "optimum_neuron.vllm.patches:NeuronCausalLM")
    # transformers wrote the artifact's config, and classes that vLLM has for its own code refuse some. DeepSeek-V4's fails either way.
    for model_type in config._CONFIG_REGISTRY.keys() & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys():
        del config._CONFIG_REGISTRY[model_type]
    config.is_rope_parameters_nested = _has_sets_by_name
    # vLLM fills arguments in, and checks some, before its platform sees any of them.
    EngineArgs.create_engine_config = watch_arguments(EngineArgs.create_engine_config)
    if not torch.accelerator.is_available():
        # vLLM empties the accelerator's caches when an engine ends, and torch raises where there is none.
        torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = lambda: None


def _has_sets_by_name(rope_parameters: dict[str, Any]) -> bool:
    """Return whether rotary parameters are several sets, each under a name; vLLM looks under types of layers alone."""
    sets = rope_parameters.values()
    return bool(rope_parameters) and all(value is None or isinstance(value, dict) for value in sets)
