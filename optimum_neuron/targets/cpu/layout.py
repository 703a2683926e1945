# SPDX-License-Identifier: Apache-2.0
"""The layout of experts' weights that the kernel reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...artifact.tensor_file import TensorLike
from ...checkpoints.mapped import in_file
from ...step.features.codes.modules import is_experts


def use_natural_layout(model: nn.Module, stored: Mapping[str, TensorLike] | None = None) -> None:
    """Turn the weights of transposed experts into `[experts, out, in]`, as the kernel reads them.

    Args:
        stored: what the weights will be replaced by, named as in `weights.named_tensors`: layers stay as they are where
            these have the model's own layout.
    """
    for name, module in model.named_modules():
        if is_experts(module) and module.is_transposed:
            weights = _weights(module)
            # Where all are square, both layouts look alike.
            oblong = [each for each, weight in weights.items() if weight.shape[1] != weight.shape[2]]
            own = None if stored is None or not oblong else stored.get(f"model.{name}.{oblong[0]}")
            if oblong and (own is None or tuple(own.shape) != tuple(weights[oblong[0]].shape)):
                for weight in weights.values():
                    weight.data = in_file(weight.data.transpose(1, 2).contiguous())
                module.is_transposed = False


def _weights(experts: Any) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in experts.named_parameters(recurse=False) if weight.dim() == 3}
