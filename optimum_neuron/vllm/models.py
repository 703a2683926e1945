# SPDX-License-Identifier: Apache-2.0
"""The model class that vLLM asks for. Its own modelling code is never run: the compiled graphs are the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class NeuronCausalLM(nn.Module):
    """A stand-in for a model with modelling code in transformers: vLLM asks its type only.

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
