# SPDX-License-Identifier: Apache-2.0
"""Arrays as torch tensors and back, in the same memory, for the runtimes that bring a torch of their own."""

from __future__ import annotations

from typing import Any

import numpy as np


def from_array(array: np.ndarray, dtype: str) -> Any:
    """A tensor of torch's type of that name."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).view(getattr(torch, dtype)).view(array.shape)


def to_array(tensor: Any) -> np.ndarray:
    """The bytes of a tensor on the CPU."""
    import torch

    array: np.ndarray = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array
