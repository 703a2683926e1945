# SPDX-License-Identifier: Apache-2.0
"""Changes of vLLM and torch for a whole process: each once, here, with the reason."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import ModelRegistry
from vllm.engine.arg_utils import EngineArgs
from vllm.transformers_utils import config

from .engine_args import watched


def patch_process() -> None:
    """Make all changes, before vLLM makes a configuration. To be called once in a process, as vLLM calls its plugins."""
    # vLLM imports the code that it has for an architecture to learn its type, with what that needs of packages and devices.
    for architecture in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())):
        ModelRegistry.register_model(architecture, "optimum_neuron.vllm.models:NeuronCausalLM")
    # transformers wrote the artifact's config, and classes that vLLM has for its own code refuse some. DeepSeek-V4's fails either way.
    for model_type in config._CONFIG_REGISTRY.keys() & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys():
        del config._CONFIG_REGISTRY[model_type]
    # vLLM looks for several sets of rotary parameters under types of layers alone.
    config.is_rope_parameters_nested = _has_sets_by_name
    # vLLM fills arguments in, and checks some, before its platform sees any of them.
    EngineArgs.create_engine_config = watched(EngineArgs.create_engine_config)
    if not torch.accelerator.is_available():
        # vLLM empties the accelerator's caches when an engine ends, and torch raises where there is none.
        torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = lambda: None


def _has_sets_by_name(rope_parameters: dict[str, Any]) -> bool:
    """Return whether rotary parameters are several sets, each under a name."""
    return bool(rope_parameters) and all(
        value is None or isinstance(value, dict) for value in rope_parameters.values()
    )
