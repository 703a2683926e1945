# SPDX-License-Identifier: Apache-2.0
"""Index keys of a step's slots, and selections of the columns of the largest scores.

All of a step's index keys are written before any score is computed. What a token may select follows from its position alone, so no cut
of a prompt changes a selection. Of equal scores the lowest column is taken first. A score that is not a number counts as infinite: a
token that sees a broken one selects it, and gets NaN. No shape follows a value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ....errors import UnsupportedModelError
from ...attention import kv_cache
from ...attention.masks import Window
from ...attention.rows import AttentionRows, StepLayout
from ...sampling.exact_sums import FloatSteps, largest_float
from .index_keys import KeySource, Pool, ScoresOf, TopKeys


@dataclass
class SlotIndex:
    """The index backend of step graphs. Where decode rows attend before the write, they are scored without waiting for it."""

    step: StepLayout
    _visible: dict[Window, Tensor] = field(default_factory=dict)

    def keep_index(self, layer_idx: int, keys: Tensor) -> KeySource:
        cache, ops = self.step.cache.find_state("index", layer_idx), self.step.ops
        if cache is None:
            return KeySource()
        own, _ = kv_cache.whole_or_nan(keys[:, None], keys[:, None])
        apart = ops.attend_decode is not None
        before = [_read_keys(group, cache) if apart and group.decodes else None for group in self.step.groups]
        ops.write_cache(cache, own, *self.step.block_places)
        return _LayerIndex(self, cache, own, before)

    def visible(self, window: Window) -> Tensor:
        if window not in self._visible:
            self._visible[window] = torch.cat([group.visible(window).flatten(0, 1) for group in self.step.groups])
        return self._visible[window]

    def select_groups(self, scores: Tensor, of: ScoresOf, count: int, first: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the groups of `width` columns with the largest scores, of those with a column `first` that a token sees; and these."""
        window = None if of.mask is None else of.mask.visible_window()
        visible = self.visible(window)[:, None, first::width].expand(scores.shape)
        shown = visible & (scores != -torch.inf) if of.hidden else visible
        found = select_largest(scores.flatten(0, 1), shown.flatten(0, 1), count)
        return found.unflatten(0, scores.shape[:2]), visible


def _read_keys(group: AttentionRows, cache: Tensor) -> Tensor:
    return kv_cache.read_cache(cache, group.blocks, len(group.position_ids), group.context_length)[:, 0]


@dataclass
class _LayerIndex(KeySource):
    """A layer's index keys in the cache, and `own [tokens, 1, dim]`; `before` has the cache before the step for some row groups."""

    index: SlotIndex
    cache: Tensor
    own: Tensor
    before: list[Tensor | None]

    @property
    def columns(self) -> int:  # type: ignore[override]
        return self.index.step.groups[0].context_length

    def multiply_query(self, query: Tensor) -> Tensor:
        step, products = self.index.step, []
        for group, tokens, before in zip(step.groups, step.token_ranges, self.before, strict=True):
            found = products_of(query[tokens], _read_keys(group, self.cache) if before is None else before)
            if before is not None:
                own = products_of(query[tokens], self.own[tokens])
                column = torch.arange(self.columns, dtype=torch.int32)
                found = torch.where((column == group.position_ids)[:, None], own, found)
            products.append(found)
        return torch.cat(products) if len(products) > 1 else products[0]

    def select_top(self, scores: Tensor, of: ScoresOf, count: int) -> TopKeys:
        """Select blocks of columns; a token sees one where it sees its first column, and attention hides the rest."""
        if count * of.width >= self.columns:
            return TopKeys(None)
        found, _ = self.index.select_groups(scores, of, count, 0, of.width)
        return TopKeys(_by_column(found, of.width)[..., : self.columns])

    def pool_keys(self, width: int, finish: Pool) -> KeySource:
        if self.columns < width:
            return KeySource()
        length = self.columns // width * width
        means = [
            _read_keys(group, self.cache)[:, :length].unflatten(1, (-1, width)).float().mean(2)
            for group in self.index.step.groups
        ]
        return _Pools(self, width, [finish(each.to(self.own.dtype)) for each in means])


@dataclass
class _Pools(KeySource):
    """The keys of `width` columns each, `[rows, pools, dim]` by row group, made of what is written; incomplete pools are undefined."""

    layer: _LayerIndex
    width: int
    keys: list[Tensor]

    @property
    def columns(self) -> int:  # type: ignore[override]
        return self.keys[0].shape[1]

    def multiply_query(self, query: Tensor) -> Tensor:
        ranges = self.layer.index.step.token_ranges
        products = [products_of(query[tokens], keys) for tokens, keys in zip(ranges, self.keys, strict=True)]
        return torch.cat(products) if len(products) > 1 else products[0]

    def select_top(self, scores: Tensor, of: ScoresOf, count: int) -> TopKeys:
        """Return the columns of selected pools, and all that no complete pool has."""
        every, width = self.layer.columns, self.width
        if (count + 1) * width > every:
            return TopKeys(None)
        found, complete = self.layer.index.select_groups(scores, of, count, width - 1, width)
        found = _by_column(found | ~complete, width)
        rest = found.new_ones((*found.shape[:2], every - found.shape[-1]))
        return TopKeys(torch.cat([found, rest], dim=-1) if rest.numel() else found)

    def pool_keys(self, width: int, finish: Pool) -> KeySource:
        raise UnsupportedModelError("it makes pools of pools of index keys")


def _by_column(found: Tensor, width: int) -> Tensor:
    return found if width == 1 else found[..., None].expand(*found.shape, width).flatten(-2)


def products_of(query: Tensor, keys: Tensor) -> Tensor:
    """Return `[rows * tokens, n, columns]` from `query [rows * tokens, n, dim]` and `keys [rows, columns, dim]`."""
    by_row = query.unflatten(0, (len(keys), -1)).flatten(1, 2)
    return (by_row @ keys.transpose(1, 2).to(query.dtype)).unflatten(1, (-1, query.shape[1])).flatten(0, 1)


# Few values of a digit are tried at a time: each of them reads all scores.
_BASE = 4
_STEPS = FloatSteps(
    ((128.0, 4), (32.0, 4), (8.0, 4), (2.0, 4), (1.0, 2)), (*((2.0**bit, 4) for bit in range(21, 0, -2)), (1.0, 2))
)


def select_largest(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Return `[rows, columns]` bool: the `count` visible columns of the largest scores, of equal ones the lowest; or all, if fewer."""
    scores = torch.where(scores.isnan(), torch.inf, scores)

    def count_found(lowest: Tensor) -> Tensor:
        counted = visible[:, None] & (scores[:, None] >= lowest[..., None])
        return (counted.float().sum(-1) >= count).float().sum(-1, keepdim=True)

    smallest = largest_float(count_found, scores[:, :1], _STEPS)
    above = visible & (scores > smallest)
    tied = visible & (scores >= smallest) & ~above
    room = count - above.float().sum(-1, keepdim=True)
    column = torch.arange(scores.shape[-1], dtype=torch.int32).float()
    return above | (tied & (column < _find_bound(tied, column, room)))


def _find_bound(tied: Tensor, column: Tensor, room: Tensor) -> Tensor:
    """Return `[rows, 1]`: the largest number of first columns of which no more than `room [rows, 1]` are tied."""
    bound, unit = torch.zeros_like(room), 1
    while unit * _BASE <= tied.shape[-1]:
        unit *= _BASE
    while unit:
        tried = bound + float(unit) * torch.arange(1, _BASE, dtype=torch.float32)
        before = (tied[:, None] & (column < tried[..., None])).float().sum(-1)
        bound = bound + float(unit) * (before <= room).float().sum(-1, keepdim=True)
        unit //= _BASE
    return bound
