# SPDX-License-Identifier: Apache-2.0
"""Index keys of a step's slots.

As with keys and values, all of a step's index keys are written before any token's scores are computed over its own slot's columns. What
a token may select follows from its position alone, so a selection does not depend on where a prompt was cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ....errors import UnsupportedModelError
from ...attention import kv_cache
from ...attention.cached_attention import CacheWrite
from ...attention.masks import Window
from ...attention.rows import AttentionRows
from .index_keys import KeySource, Pool, ScoresOf
from .selection import select_largest
from .top_keys import TopKeys


@dataclass
class SlotIndex:
    """The index backend of step graphs.

    A layer without index keys in the cache attends to all that its tokens see.

    Attributes:
        write_blocks, write_columns: `[tokens]`, where each token of the step goes in the cache.
        groups: the row groups, in the order of their tokens in the step.
        decodes_apart: decode rows are scored over the cache before the step and over their own keys, so that no product waits for
            the write.
    """

    cache: kv_cache.KVCache
    write_blocks: Tensor
    write_columns: Tensor
    groups: list[AttentionRows]
    write_cache: CacheWrite
    decodes_apart: bool
    _visible: dict[Window, Tensor] = field(default_factory=dict)

    def keep_index(self, layer_idx: int, keys: Tensor) -> KeySource:
        cache = self.cache.find_state("index", layer_idx)
        if cache is None:
            return KeySource()
        own, _ = kv_cache.whole_or_nan(keys[:, None], keys[:, None])
        before = [self._read_keys(group, cache) if self._is_apart(group) else None for group in self.groups]
        self.write_cache(cache, own, self.write_blocks, self.write_columns)
        return _LayerIndex(self, cache, own, before)

    def _is_apart(self, group: AttentionRows) -> bool:
        return self.decodes_apart and group.decodes

    @staticmethod
    def _read_keys(group: AttentionRows, cache: Tensor) -> Tensor:
        """Return `[rows, columns, dim]`."""
        return kv_cache.read_cache(cache, group.blocks, len(group.position_ids), group.context_length)[:, 0]

    def visible(self, window: Window) -> Tensor:
        """Return `[tokens, columns]`."""
        if window not in self._visible:
            self._visible[window] = torch.cat([group.visible(window).flatten(0, 1) for group in self.groups])
        return self._visible[window]


@dataclass
class _LayerIndex(KeySource):
    """A layer's index keys in the cache.

    Attributes:
        own: `[tokens, 1, dim]`, those of the step's tokens.
        before: by row group, the cache before the step, where its tokens are scored over that and their own.
    """

    index: SlotIndex
    cache: Tensor
    own: Tensor
    before: list[Tensor | None]

    @property
    def columns(self) -> int:  # type: ignore[override]
        return self.index.groups[0].context_length

    def multiply_query(self, query: Tensor) -> Tensor:
        products, start = [], 0
        for group, before in zip(self.index.groups, self.before, strict=True):
            stop = start + group.position_ids.numel()
            keys = self.index._read_keys(group, self.cache) if before is None else before
            found = products_of(query[start:stop], keys)
            if before is not None:
                own = products_of(query[start:stop], self.own[start:stop])
                column = torch.arange(self.columns, dtype=torch.int32)
                found = torch.where((column == group.position_ids)[:, None], own, found)
            products.append(found)
            start = stop
        return torch.cat(products) if len(products) > 1 else products[0]

    def select_top(self, scores: Tensor, of: ScoresOf, count: int) -> TopKeys:
        """Select blocks of columns; a token sees one where it sees its first column, and attention hides the rest."""
        if count * of.width >= self.columns:
            return TopKeys(None)
        visible = self.index.visible(None if of.mask is None else of.mask.visible_window())
        visible = visible[:, None, :: of.width].expand(scores.shape)
        if of.hidden:
            visible = visible & (scores != -torch.inf)
        found = select_largest(scores.flatten(0, 1), visible.flatten(0, 1), count).unflatten(0, scores.shape[:2])
        return TopKeys(_by_column(found, of.width)[..., : self.columns])

    def pool_keys(self, width: int, finish: Pool) -> KeySource:
        if self.columns < width:
            return KeySource()
        length = self.columns // width * width
        means = [
            self.index._read_keys(group, self.cache)[:, :length].unflatten(1, (-1, width)).float().mean(2)
            for group in self.index.groups
        ]
        return _Pools(self, width, [finish(each.to(self.own.dtype)) for each in means])


@dataclass
class _Pools(KeySource):
    """Keys of `width` columns each, made of what is written; those of incomplete pools are undefined.

    Attributes:
        keys: by row group, `[rows, pools, dim]`.
    """

    layer: _LayerIndex
    width: int
    keys: list[Tensor]

    @property
    def columns(self) -> int:  # type: ignore[override]
        return self.keys[0].shape[1]

    def multiply_query(self, query: Tensor) -> Tensor:
        sizes = [group.position_ids.numel() for group in self.layer.index.groups]
        products = [products_of(own, keys) for own, keys in zip(query.split(sizes), self.keys, strict=True)]
        return torch.cat(products) if len(products) > 1 else products[0]

    def select_top(self, scores: Tensor, of: ScoresOf, count: int) -> TopKeys:
        """Return the columns of selected pools, and all that no complete pool has."""
        every, width = self.layer.columns, self.width
        if (count + 1) * width > every:
            return TopKeys(None)
        visible = self.layer.index.visible(None if of.mask is None else of.mask.visible_window())
        complete = visible[:, None, width - 1 :: width].expand(scores.shape)
        found = select_largest(scores.flatten(0, 1), complete.flatten(0, 1), count).unflatten(0, scores.shape[:2])
        found = _by_column(found | ~complete, width)
        rest = found.new_ones((*found.shape[:2], every - found.shape[-1]))
        return TopKeys(torch.cat([found, rest], dim=-1) if rest.numel() else found)

    def pool_keys(self, width: int, finish: Pool) -> KeySource:
        raise UnsupportedModelError("it makes pools of pools of index keys")


def _by_column(found: Tensor, width: int) -> Tensor:
    """Return the columns `[..., blocks * width]` of selected blocks `[..., blocks]`."""
    return found if width == 1 else found[..., None].expand(*found.shape, width).flatten(-2)


def products_of(query: Tensor, keys: Tensor) -> Tensor:
    """Return `[rows * tokens, n, columns]` from `query [rows * tokens, n, dim]` and `keys [rows, columns, dim]`."""
    by_row = query.unflatten(0, (len(keys), -1)).flatten(1, 2)
    return (by_row @ keys.transpose(1, 2).to(query.dtype)).unflatten(1, (-1, query.shape[1])).flatten(0, 1)
