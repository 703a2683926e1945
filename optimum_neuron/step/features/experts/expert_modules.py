# SPDX-License-Identifier: Apache-2.0
"""Which modules hold transformers' experts."""

from __future__ import annotations

from torch import nn


def is_experts(module: nn.Module) -> bool:
    """Whether a module is one of transformers' experts interface, which tells how its parameters are laid out."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))
