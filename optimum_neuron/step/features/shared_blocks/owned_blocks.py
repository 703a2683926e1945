# SPDX-License-Identifier: Apache-2.0
"""What tokens see by their positions, and so what the owners of blocks see of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...masks import AttentionChunk, Window


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

    def added_bias(self, table: Tensor, length: int) -> Tensor:
        """`[K, heads, 1, length]`: what is added to the scores of a block's owner, less what its own column gets.

        Args:
            table: `[heads, columns]`.
        """
        own = _of_tokens(table, self.position_ids[:, 0]).index_select(0, self.block_owner)
        return (_of_blocks(table, self.block_base, length) - own[:, :, None])[:, :, None]

    def added_bias_of_shared(self, table: Tensor, length: int) -> Tensor:
        """`[X, heads, R, length]`: the same of shared blocks and all rows."""
        assert self.shared_base is not None
        own = _of_tokens(table, self.position_ids[:, 0]).transpose(0, 1)
        return _of_blocks(table, self.shared_base, length)[:, :, None] - own[:, :, None]


def _of_tokens(table: Tensor, positions: Tensor) -> Tensor:
    """`[R, heads]` float32: what a table of columns has for tokens."""
    return table.float().index_select(1, positions.clamp(min=0)).transpose(0, 1)


def _of_blocks(table: Tensor, base: Tensor, length: int) -> Tensor:
    """`[blocks, heads, length]` float32: what it has for the columns of blocks; any for those that nobody has."""
    parts = table.float().unflatten(1, (-1, length))
    number = torch.div(base, length, rounding_mode="floor").clamp(0, parts.shape[1] - 1)
    return parts.index_select(1, number).transpose(0, 1)


def _earlier(base: Tensor, positions: Tensor, window: Window, length: int) -> Tensor:
    columns = (base[:, None] + torch.arange(length, dtype=torch.int32))[:, None, :]
    return sees(columns, positions, window) & (columns < positions)
