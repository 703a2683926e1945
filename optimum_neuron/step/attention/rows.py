# SPDX-License-Identifier: Apache-2.0
"""The rows of a step and the keys that their tokens see, from positions alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .masks import AttentionChunk, Window


def sees_columns(columns: Tensor, positions: Tensor, window: Window) -> Tensor:
    """Return whether tokens at `positions` may see those at positions `columns`; the two are broadcast."""
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
        """Return `[K, 1, length]`: the tokens of a block that its owner sees of the cache as it was before the step."""
        key = (window, False, length)
        if key not in self.masks:
            positions = self.position_ids.index_select(0, self.block_owner)[:, :, None]
            self.masks[key] = _earlier_columns(self.block_base, positions, window, length)
        return self.masks[key]

    def seen_shared(self, window: Window, length: int) -> Tensor:
        """Return `[X, R, length]`: the same for shared blocks and all rows, also those that have no part in a block."""
        assert self.shared_base is not None
        key = (window, True, length)
        if key not in self.masks:
            self.masks[key] = _earlier_columns(self.shared_base, self.position_ids[None], window, length)
        return self.masks[key]

    def added_bias(self, table: Tensor, length: int) -> Tensor:
        """Return `[K, heads, 1, length]`: what is added to the scores of a block's owner, less what its own column gets.

        Args:
            table: `[heads, columns]`.
        """
        own = _of_tokens(table, self.position_ids[:, 0]).index_select(0, self.block_owner)
        return (_of_blocks(table, self.block_base, length) - own[:, :, None])[:, :, None]

    def added_bias_of_shared(self, table: Tensor, length: int) -> Tensor:
        """Return `[X, heads, R, length]`: the same for shared blocks and all rows."""
        assert self.shared_base is not None
        own = _of_tokens(table, self.position_ids[:, 0]).transpose(0, 1)
        return _of_blocks(table, self.shared_base, length)[:, :, None] - own[:, :, None]


def _of_tokens(table: Tensor, positions: Tensor) -> Tensor:
    """Return a table's numbers for tokens: `[R, heads]` float32."""
    return table.float().index_select(1, positions.clamp(min=0)).transpose(0, 1)


def _of_blocks(table: Tensor, base: Tensor, length: int) -> Tensor:
    """Return a table's numbers for the columns of blocks, `[blocks, heads, length]` float32; any for unowned blocks."""
    parts = table.float().unflatten(1, (-1, length))
    number = torch.div(base, length, rounding_mode="floor").clamp(0, parts.shape[1] - 1)
    return parts.index_select(1, number).transpose(0, 1)


def _earlier_columns(base: Tensor, positions: Tensor, window: Window, length: int) -> Tensor:
    columns = (base[:, None] + torch.arange(length, dtype=torch.int32))[:, None, :]
    return sees_columns(columns, positions, window) & (columns < positions)


@dataclass
class AttentionRows:
    """A group of rows of a step: all rows have the same number of tokens.

    Attributes:
        position_ids: `[rows, tokens]`; padding repeats the last position, an idle row has -1.
        blocks: the rows' parts of the cache, for `read_cache`: `[rows, n]` blocks, or `[rows]` slots; None where row i is slot i.
        decodes: these are decode rows, of one token each, which is alone in its blocks in this step.
        slots: `[rows]`; None where row i is slot i.
        owned: owners of blocks, for decode rows with blocks in place; `blocks` is None.
    """

    position_ids: Tensor
    blocks: Tensor | None
    context_length: int
    decodes: bool = False
    owned: OwnedBlocks | None = None
    slots: Tensor | None = None
    masks: dict[tuple[Window, int, int], Tensor] = field(default_factory=dict)
    columns: dict[tuple[Window, int, int], Tensor] = field(default_factory=dict)
    past: dict[tuple[Window, int, int], Tensor] = field(default_factory=dict)
    compressed: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[tuple[int, int], AttentionRows] = field(default_factory=dict)

    def visible(self, sliding_window: Window, start: int = 0, stop: int | None = None) -> Tensor:
        """Return `[rows, tokens, stop - start]`: the cache columns that a token may see. Built once per window and step."""
        stop = self.context_length if stop is None else stop
        key = (sliding_window, start, stop)
        if key not in self.masks:
            columns = torch.arange(start, stop, dtype=torch.int32)
            self.masks[key] = sees_columns(columns, self.position_ids[:, :, None], sliding_window)
        return self.masks[key]

    def seen(self, sliding_window: Window, start: int = 0, stop: int | None = None) -> Tensor:
        """Return `[rows, stop - start]`: the cache columns that any token of a row may see."""
        stop = self.context_length if stop is None else stop
        key = (sliding_window, start, stop)
        if key not in self.columns:
            self.columns[key] = self.visible(sliding_window, start, stop).any(1)
        return self.columns[key]

    def earlier(self, sliding_window: Window, start: int, stop: int) -> Tensor:
        """Return `visible` without each token's own column: what it may see of the cache as it was before the step."""
        key = (sliding_window, start, stop)
        if key not in self.past:
            columns = torch.arange(start, stop, dtype=torch.int32)
            self.past[key] = self.visible(*key) & (columns < self.position_ids[:, :, None])
        return self.past[key]

    def visible_groups(self, rate: int) -> Tensor:
        """Return `[rows, tokens, groups]`: the keys for `rate` tokens each that a token may see."""
        if rate not in self.compressed:
            self.compressed[rate] = visible_groups(self.position_ids, rate, self.context_length // rate)
        return self.compressed[rate]

    def part(self, start: int, stop: int) -> AttentionRows:
        """Return the same rows with only these tokens."""
        key = (start, stop)
        if key not in self.parts:
            positions = self.position_ids[:, start:stop]
            self.parts[key] = AttentionRows(positions, self.blocks, self.context_length, slots=self.slots)
        return self.parts[key]


def actual_tokens_mask(position_ids: Tensor) -> Tensor:
    """Return `[rows, tokens]`: a token is real where its position is larger than the one before; an idle row has none."""
    first = position_ids[:, :1] >= 0
    return torch.cat([first, position_ids[:, 1:] > position_ids[:, :-1]], dim=1)


def visible_groups(position_ids: Tensor, ratio: int, groups: int) -> Tensor:
    """Return the compressed keys that a token may see, where one key stands for `ratio` consecutive positions.

    A token sees the groups that end at or before its own position: `(position + 1) // ratio` of them. The bound is each token's own,
    never that of its chunk, so it does not depend on how a prompt was cut.

    Args:
        position_ids: `[rows, tokens]`; an idle row has -1 and sees nothing.
        groups: compressed keys that the cache has room for.

    Returns:
        `[rows, tokens, groups]`, bool.
    """
    complete = torch.div(position_ids + 1, ratio, rounding_mode="floor")
    return torch.arange(groups, dtype=torch.int32) < complete[:, :, None]
