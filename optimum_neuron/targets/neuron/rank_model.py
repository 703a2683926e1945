# SPDX-License-Identifier: Apache-2.0
"""The model as one rank's graphs contain it: its shapes and code, with memory that nothing reads or writes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ...checkpoint import assign, empty_model
from ...config import NeuronConfig
from ...weights import named_tensors
from .experts import use_static_experts


def rank_model(
    folder: Path, config: NeuronConfig, tied_weights: dict[str, str], *, trust_remote_code: bool
) -> nn.Module:
    """Builds the model of a folder's config.json with uninitialized weights.

    Memory that nobody touches costs nothing, so this takes no more than the model's code, whatever its size.
    """
    model = empty_model(folder, config.dtype, trust_remote_code=trust_remote_code)
    use_static_experts(model)
    tensors: dict[str, Tensor] = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in named_tensors(model).items()
    }
    assign(model, tensors | {alias: tensors[stored] for alias, stored in tied_weights.items()})
    return model
