# SPDX-License-Identifier: Apache-2.0
"""A state of all ranks as one tensor: what the ranks hold of a cache, joined along its heads or channels.

A state of one dimension has neither, and is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..graph_io import cut_dim


def join_states(parts: Sequence[Tensor]) -> Tensor:
    """One tensor from those of the ranks, in their order."""
    return parts[0] if len(parts) == 1 or parts[0].dim() == 1 else torch.cat(list(parts), dim=cut_dim(parts[0].shape))


def split_state(tensor: Tensor, world_size: int) -> Sequence[Tensor]:
    """Return each rank's part of what `join_states` made; raise ValueError where heads or channels do not divide."""
    if world_size == 1 or tensor.dim() == 1:
        return [tensor] * world_size
    dim = cut_dim(tensor.shape)
    if tensor.shape[dim] % world_size:
        raise ValueError(
            f"a state of {tensor.shape[dim]} heads or channels is not that of {world_size} ranks; read one first"
        )
    return [part.contiguous() for part in tensor.chunk(world_size, dim=dim)]
