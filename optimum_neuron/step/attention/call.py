# SPDX-License-Identifier: Apache-2.0
"""One layer's attention, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .masks import Window


@dataclass(frozen=True)
class CompressedKeys:
    """Keys `[slots, 1, groups, dim]`, also values, that stand for `rate` tokens each, which attention reads next to keys and values.

    `selected` are the groups that a token attends to of those that it sees, bool; None: all. They are `[tokens, groups]` in the call of a
    layer, `[rows, tokens, groups]` in the call of a group of rows.
    """

    keys: Tensor
    rate: int
    selected: Tensor | None = None


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention.

    Attributes:
        query: `[1, heads, tokens, key_dim]`.
        key, value: the same with the layer's kv heads.
        sliding_window: what a token sees of the past: all of it, a window, or its own chunk.
        column_bias: `[heads, columns]`, added to the scores of a key by its column, which is its position. A number that all keys
            of a query have in addition changes nothing.
        selected: bool, the keys that a token attends to of those that it sees; None: all. `[tokens, 1 or kv_heads, columns]` in the
            call of a layer, `[rows, 1 or kv_heads, tokens, columns]` in the call of a group of rows.
        compressed: further keys.
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
    """A backend that computes every attention call of a forward pass."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return `[1, tokens, heads, value_dim]`."""
