# SPDX-License-Identifier: Apache-2.0
"""Keys and values of all slots in a row, for a model that attends by code of its own: the mask alone gives each token its own.

A slot of a cache of blocks is gathered in their order, so a token has the same bits wherever its blocks lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...attention import kv_cache
from ...attention.cached_attention import MASKED, MASKED_HALF, select_columns
from ...attention.masks import CausalMask
from ...attention.rows import AttentionRows


@dataclass(frozen=True)
class SlotKeys:
    """All slots of one step, of `columns` each.

    Attributes:
        last: `[slots]`, the last column with tokens of the step; -1 without.
        tables: `[slots, columns / block_length]`, the blocks of each slot with tokens in the step, any of others; None: slot i is block i.
    """

    groups: list[AttentionRows]
    columns: int
    last: Tensor
    tables: Tensor | None

    @classmethod
    def for_step(cls, groups: list[AttentionRows], slots: int, *, has_blocks: bool) -> SlotKeys:
        last, tables = torch.full((slots,), -1, dtype=torch.int32), torch.zeros((slots, 1), dtype=torch.int32)
        for group in groups:
            position = group.position_ids.amax(1)
            if group.slots is None:
                last, tables = position, tables if group.blocks is None else group.blocks
                continue
            # An idle row names a slot of an earlier step.
            own = (group.slots == torch.arange(slots, dtype=torch.int32)[:, None]) & (position >= 0)
            last = torch.maximum(last, torch.where(own, position, -1).amax(1))
            if group.blocks is not None and has_blocks:
                found = torch.where(own[:, :, None], group.blocks, -1).amax(1)
                tables = torch.where(found >= 0, found, tables)
        return cls(groups, groups[0].context_length, last, tables if has_blocks else None)

    def read_slots(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return `[1, kv_heads, slots * columns, dim]` each, with zeros for what is not finite and for what no token sees."""
        slots = len(self.last)
        read = [kv_cache.read_cache(each, self.tables, slots, self.columns) for each in (keys, values)]
        kept = (torch.arange(self.columns, dtype=torch.int32) <= self.last[:, None]) & (
            kv_cache.broken_columns(read[0]) == 0
        )
        keys, values = (select_columns(each, kept).transpose(0, 1).flatten(1, 2)[None] for each in read)
        return keys, values

    def make_bias(self, mask: CausalMask, dtype: torch.dtype) -> Tensor:
        """Return `[1, 1, tokens, slots * columns]`, to be added to the scores of all slots."""
        window = mask.visible_window()
        slots = torch.arange(len(self.last), dtype=torch.int32)
        rows = []
        for group in self.groups:
            own = slots if group.slots is None else group.slots
            visible = group.visible(window, 0, self.columns)[:, :, None] & (own[:, None] == slots)[:, None, :, None]
            rows.append(visible.flatten(2).flatten(0, 1))
        fill = MASKED_HALF if dtype == torch.float16 else MASKED
        return torch.where(torch.cat(rows), 0.0, fill).to(dtype)[None, None]
