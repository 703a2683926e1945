# SPDX-License-Identifier: Apache-2.0
"""The rows of one step, from which each kind of layer state makes its backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from .kv_cache import KVCache
from .rows import AttentionRows


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
