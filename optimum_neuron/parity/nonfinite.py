# SPDX-License-Identifier: Apache-2.0
"""A search for NaN and infinity in weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn


_COUNTED_AT_ONCE = 1 << 20
# Of codes, scales say what they stand for.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def describe_nonfinite(model: nn.Module) -> str | None:
    """Return the first parameter that holds NaN or infinity, in words; None where all are numbers."""
    found = (nonfinite(name, tensor) for name, tensor in model.named_parameters())
    return next(filter(None, found), None)


def nonfinite(name: str, tensor: Tensor) -> str | None:
    if not tensor.numel() or tensor.dtype not in _FLOATS or all(each.isfinite() for each in tensor.aminmax()):
        return None
    # In pieces: torch takes 8 bytes for each element that it counts.
    pieces = tensor.reshape(-1).split(_COUNTED_AT_ONCE)
    count = sum(piece.numel() - int(piece.isfinite().sum()) for piece in pieces)
    return f"{name} holds NaN or infinity in {count:,} of {tensor.numel():,} places; repair it, or download it again"
