# SPDX-License-Identifier: Apache-2.0
"""The layout of experts' weights that the kernel reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...artifact.tensor_file import Stored
from ...checkpoints.scratch import in_file
from ...step.features.experts.expert_modules import is_experts


def use_natural_layout(model: nn.Module, stored: Mapping[str, Stored] | None = None) -> None:
    """Turns the weights of transposed experts into `[experts, out, in]`, as the kernel and a memory bus like them.

    Args:
        stored: what the weights will be replaced by, named as in `weights.named_tensors`: layers stay as they are where
            these have the model's own layout.
    """
    for name, module in model.named_modules():
        if is_experts(module) and module.is_transposed:
            weights = _weights(module)
            # Where all are square, no reader could tell the layouts apart.
            told = [each for each, weight in weights.items() if weight.shape[1] != weight.shape[2]]
            own = None if stored is None or not told else stored.get(f"model.{name}.{told[0]}")
            if told and (own is None or tuple(own.shape) != tuple(weights[told[0]].shape)):
                for weight in weights.values():
                    weight.data = in_file(weight.data.transpose(1, 2).contiguous())
                module.is_transposed = False


def _weights(experts: Any) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in experts.named_parameters(recurse=False) if weight.dim() == 3}
