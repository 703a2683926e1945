# SPDX-License-Identifier: Apache-2.0
"""The rows of a step and the keys that their tokens see, from positions alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .kv_cache import KVCache
from .masks import AttentionChunk, Window


def sees_columns(columns: Tensor, positions: Tensor, window: Window) -> Tensor:
    """Return whether tokens at `positions` may see those at positions `columns`; the two are broadcast."""
    visible = columns <= positions
    if isinstance(window, AttentionChunk):
        return visible & (columns >= positions - positions % window.size)
    return visible if window is None else visible & (columns > positions - window)


@dataclass
class OwnedBlocks:
    """`BlockOwners` as tensors, None for shared blocks without a place, with the positions of the rows `[R, 1]`."""

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
        """Return `[K, heads, 1, length]`: what a table `[heads, columns]` adds to an owner's scores, less what its own column gets."""
        own = _of_tokens(table, self.position_ids[:, 0]).index_select(0, self.block_owner)
        return (_of_blocks(table, self.block_base, length) - own[:, :, None])[:, :, None]

    def added_bias_of_shared(self, table: Tensor, length: int) -> Tensor:
        """Return `[X, heads, R, length]`: the same for shared blocks and all rows."""
        assert self.shared_base is not None
        own = _of_tokens(table, self.position_ids[:, 0]).transpose(0, 1)
        return _of_blocks(table, self.shared_base, length)[:, :, None] - own[:, :, None]


def _of_tokens(table: Tensor, positions: Tensor) -> Tensor:
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
    made: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)  # once per step
    parts: dict[tuple[int, int], AttentionRows] = field(default_factory=dict)

    def visible(self, sliding_window: Window, start: int = 0, stop: int | None = None) -> Tensor:
        """Return `[rows, tokens, stop - start]`: the cache columns that a token may see."""
        stop = self.context_length if stop is None else stop
        key = ("visible", sliding_window, start, stop)
        if key not in self.made:
            columns = torch.arange(start, stop, dtype=torch.int32)
            self.made[key] = sees_columns(columns, self.position_ids[:, :, None], sliding_window)
        return self.made[key]

    def seen(self, sliding_window: Window, start: int = 0, stop: int | None = None) -> Tensor:
        """Return `[rows, stop - start]`: the cache columns that any token of a row may see."""
        stop = self.context_length if stop is None else stop
        key = ("seen", sliding_window, start, stop)
        if key not in self.made:
            self.made[key] = self.visible(sliding_window, start, stop).any(1)
        return self.made[key]

    def earlier(self, sliding_window: Window, start: int, stop: int) -> Tensor:
        """Return `visible` without each token's own column: what it may see of the cache as it was before the step."""
        key = ("earlier", sliding_window, start, stop)
        if key not in self.made:
            columns = torch.arange(start, stop, dtype=torch.int32)
            self.made[key] = self.visible(sliding_window, start, stop) & (columns < self.position_ids[:, :, None])
        return self.made[key]

    def visible_groups(self, rate: int) -> Tensor:
        """Return `[rows, tokens, groups]`: the keys for `rate` tokens each that a token may see."""
        key = ("groups", rate)
        if key not in self.made:
            self.made[key] = visible_groups(self.position_ids, rate, self.context_length // rate)
        return self.made[key]

    def part(self, start: int, stop: int) -> AttentionRows:
        """Return the same rows with only these tokens, as one object per step: its masks are made once, too."""
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
    """Return `[rows, tokens, groups]` bool: the keys for `ratio` consecutive positions each that a token may see.

    They are the groups that end at or before its own position, of which an idle row has -1, never its chunk's: cuts change nothing.
    """
    complete = torch.div(position_ids + 1, ratio, rounding_mode="floor")
    return torch.arange(groups, dtype=torch.int32) < complete[:, :, None]


class AllSlots(Protocol):
    """The keys that a model attends over in code of its own."""

    def read_slots(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all slots in a row, from a layer's whole cache with the step's tokens in it."""


@dataclass(frozen=True)
class StepLayout:
    """The rows of one step, and where its tokens go.

    Attributes:
        groups: the row groups, in the order of their tokens in the step.
        block_places: two `[tokens]` tensors, the block and the column of each token in the KV cache.
        slot_places: two `[tokens]` tensors, the slot and the position of each token; of padding, the row after the last slot and a
            column that no other token has.
        actual: `[tokens]`, which tokens are no padding.
        slots: how many there are.
        ops: the step's operators, a `StepOps`.
        all_slots: for a model that attends by code of its own.
    """

    cache: KVCache
    groups: list[AttentionRows]
    block_places: tuple[Tensor, Tensor]
    slot_places: tuple[Tensor, Tensor]
    actual: Tensor
    slots: int
    ops: Any
    all_slots: AllSlots | None = None
