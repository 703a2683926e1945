# SPDX-License-Identifier: Apache-2.0
"""Rows of a step as attention sees them, and which keys their tokens see: from positions alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .attention_parts import visible_groups
from .features.shared_blocks.owned_blocks import OwnedBlocks, sees
from .masks import Window


@dataclass
class AttentionRows:
    """A group of rows of a step as attention sees it: all rows have the same number of tokens.

    Attributes:
        position_ids: `[rows, tokens]`; padding repeats the last position, an idle row has -1.
        blocks: what of the cache each row has, as `kv_cache.read` takes it: `[rows, n]` blocks, or `[rows]` slots; None where
            row i is slot i.
        decodes: whether these are decode rows, of one token each, which is alone in its blocks in this step.
        slots: `[rows]`; None where row i is slot i.
        owned: of decode rows whose blocks attend in place, who owns which; `blocks` is None.
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
        """`[rows, tokens, stop - start]`: which of these cache columns a token may see. Built once per window and step."""
        stop = self.context_length if stop is None else stop
        key = (sliding_window, start, stop)
        if key not in self.masks:
            columns = torch.arange(start, stop, dtype=torch.int32)
            self.masks[key] = sees(columns, self.position_ids[:, :, None], sliding_window)
        return self.masks[key]

    def seen(self, sliding_window: Window, start: int = 0, stop: int | None = None) -> Tensor:
        """`[rows, stop - start]`: which of these cache columns any token of a row may see."""
        stop = self.context_length if stop is None else stop
        key = (sliding_window, start, stop)
        if key not in self.columns:
            self.columns[key] = self.visible(sliding_window, start, stop).any(1)
        return self.columns[key]

    def earlier(self, sliding_window: Window, start: int, stop: int) -> Tensor:
        """`visible` without each token's own column: what it may see of the cache as it was before the step."""
        key = (sliding_window, start, stop)
        if key not in self.past:
            columns = torch.arange(start, stop, dtype=torch.int32)
            self.past[key] = self.visible(*key) & (columns < self.position_ids[:, :, None])
        return self.past[key]

    def visible_groups(self, rate: int) -> Tensor:
        """`[rows, tokens, groups]`: which of the context's keys a token may see that stand for `rate` tokens each."""
        if rate not in self.compressed:
            self.compressed[rate] = visible_groups(self.position_ids, rate, self.context_length // rate)
        return self.compressed[rate]

    def part(self, start: int, stop: int) -> AttentionRows:
        """The same rows, of which only these tokens attend."""
        key = (start, stop)
        if key not in self.parts:
            positions = self.position_ids[:, start:stop]
            self.parts[key] = AttentionRows(positions, self.blocks, self.context_length, slots=self.slots)
        return self.parts[key]
