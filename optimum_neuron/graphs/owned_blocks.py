# SPDX-License-Identifier: Apache-2.0
"""What tokens see by their positions, and so what the owners of blocks see of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .masks import AttentionChunk, Window


def sees(columns: Tensor, positions: Tensor, window: Window) -> Tensor:
    """Whether tokens at `positions` may see those at positions `columns`; the two are broadcast."""
    visible = columns <= positions
    if isinstance(window, AttentionChunk):
        return visible & (columns >= positions - positions % window.size)
    return visible if window is None else visible & (columns > positions - window)


@dataclass
class OwnedBlocks:
    """`BlockOwners` as tensors, with the positions of the rows.

    Attributes:
        position_ids: `[R, 1]`.
        shared_blocks, shared_base: None where a graph has no place for blocks with several owners.
    """

    position_ids: Tensor
    block_owner: Tensor
    block_base: Tensor
    joined: Tensor
    shared_blocks: Tensor | None = None
    shared_base: Tensor | None = None
    masks: dict[tuple[Window, bool, int], Tensor] = field(default_factory=dict)

    def seen(self, window: Window, length: int) -> Tensor:
        """`[K, 1, length]`: which of a block's tokens its owner sees of the cache as it was before the step."""
        key = (window, False, length)
        if key not in self.masks:
            positions = self.position_ids.index_select(0, self.block_owner)[:, :, None]
            self.masks[key] = _earlier(self.block_base, positions, window, length)
        return self.masks[key]

    def seen_shared(self, window: Window, length: int) -> Tensor:
        """`[X, R, length]`: the same of shared blocks and all rows, also those that have no part in a block."""
        assert self.shared_base is not None
        key = (window, True, length)
        if key not in self.masks:
            self.masks[key] = _earlier(self.shared_base, self.position_ids[None], window, length)
        return self.masks[key]


def _earlier(base: Tensor, positions: Tensor, window: Window, length: int) -> Tensor:
    columns = (base[:, None] + torch.arange(length, dtype=torch.int32))[:, None, :]
    return sees(columns, positions, window) & (columns < positions)
