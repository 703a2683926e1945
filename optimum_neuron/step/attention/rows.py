# SPDX-License-Identifier: Apache-2.0
"""The rows of a step and the keys that their tokens see, from positions alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
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

    def seen(self, window: Window, length: int, *, shared: bool = False) -> Tensor:
        """Return the tokens of each block that its owner sees of the cache before the step, `[K, 1, length]`.

        Of `shared` blocks, what all rows would see, `[X, R, length]`, also those that have no part in a block.
        """
        key = (window, shared, length)
        if key not in self.masks:
            owners = (
                self.position_ids[None] if shared else self.position_ids.index_select(0, self.block_owner)[:, :, None]
            )
            columns = (self._find_base(shared)[:, None] + torch.arange(length, dtype=torch.int32))[:, None, :]
            self.masks[key] = sees_columns(columns, owners, window) & (columns < owners)
        return self.masks[key]

    def added_bias(self, table: Tensor, length: int, *, shared: bool = False) -> Tensor:
        """Return what a table `[heads, columns]` adds to scores, less what a row's own column gets; any for unowned blocks.

        It is `[K, heads, 1, length]` for owners; of `shared` blocks `[X, heads, R, length]` for all rows.
        """
        own = table.float().index_select(1, self.position_ids[:, 0].clamp(min=0)).transpose(0, 1)
        own = own.transpose(0, 1) if shared else own.index_select(0, self.block_owner)
        parts = table.float().unflatten(1, (-1, length))
        number = torch.div(self._find_base(shared), length, rounding_mode="floor").clamp(0, parts.shape[1] - 1)
        of_blocks = parts.index_select(1, number).transpose(0, 1)
        return of_blocks[:, :, None] - own[:, :, None] if shared else (of_blocks - own[:, :, None])[:, :, None]

    def _find_base(self, shared: bool) -> Tensor:
        assert not shared or self.shared_base is not None
        return self.shared_base if shared and self.shared_base is not None else self.block_base


@dataclass(frozen=True)
class CompressedKeys:
    """Keys `[slots, 1, groups, dim]`, also values, that stand for `rate` tokens each, which attention reads next to keys and values.

    `selected` are the groups that a token attends to of those that it sees, bool; None: all. They are `[tokens, groups]` in the call of a
    layer, `[rows, tokens, groups]` in that of a group of rows.
    """

    keys: Tensor
    rate: int
    selected: Tensor | None = None


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention of `query [1, heads, tokens, key_dim]`, and `key` and `value` of the layer's kv heads.

    Attributes:
        sliding_window: what a token sees of the past: all of it, a window, or its own chunk.
        column_bias: `[heads, columns]`, added to the scores of a key by its column, which is its position. A number that all keys
            of a query have in addition changes nothing.
        selected: bool, the keys that a token attends to of those that it sees; None: all. `[tokens, 1 or kv_heads, columns]` in the
            call of a layer, `[rows, 1 or kv_heads, tokens, columns]` in that of a group of rows.
    """

    layer_idx: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    sliding_window: Window
    softcap: float | None
    sinks: Tensor | None
    column_bias: Tensor | None = None
    selected: Tensor | None = None
    compressed: CompressedKeys | None = None

    @property
    def attends_to_all(self) -> bool:
        """Return whether each token attends to all keys that it sees and to no others, as kernels assume."""
        return self.selected is None and self.compressed is None


class AttentionBackend(Protocol):
    """A backend that computes the attention calls of a forward pass."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return `[1, tokens, heads, value_dim]`."""


@dataclass
class AttentionRows:
    """A group of rows of a step: all rows have the same number of tokens.

    Attributes:
        position_ids: `[rows, tokens]`; padding repeats the last position, an idle row has -1.
        blocks: as `read_cache` takes them; None where blocks are in place, and `owned`.
        decodes: whether they are decode rows, of one token each, which is alone in its blocks in this step.
        slots: `[rows]`; None where row i is slot i.
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
    """Return `[rows, tokens, groups]` bool: the keys for `ratio` positions each that end at or before a token's own, never its chunk's."""
    complete = torch.div(position_ids + 1, ratio, rounding_mode="floor")
    return torch.arange(groups, dtype=torch.int32) < complete[:, :, None]


class AllSlots(Protocol):
    """The keys that a model attends over in code of its own."""

    def read_slots(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all slots in a row, from a layer's whole cache with the step's tokens in it."""


@dataclass(frozen=True)
class StepLayout:
    """The rows of one step, and where its tokens go; `ops` is a `StepOps`.

    Attributes:
        groups: the row groups, in the order of their tokens in the step.
        block_places: `[tokens]` each, the block and the column of each token in the KV cache.
        slot_places: `[tokens]` each, the slot and the position of each token; of padding, the row after the last slot and a column
            that no other token has.
        actual: `[tokens]`, which tokens are no padding.
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

    @property
    def token_ranges(self) -> list[slice]:
        """Return which tokens of the step each row group has."""
        ends = accumulate(group.position_ids.numel() for group in self.groups)
        return [slice(end - group.position_ids.numel(), end) for end, group in zip(ends, self.groups, strict=True)]
