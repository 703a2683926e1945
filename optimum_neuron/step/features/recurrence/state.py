# SPDX-License-Identifier: Apache-2.0
"""States of recurrences: linear attention, state space models, selective scans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ....config import NeuronConfig
from ...layer_state import LayerState
from ...spec import TensorSpec


@dataclass(frozen=True)
class RecurrentState(LayerState):
    """The state of the layer's recurrence of number `index`, in float32: `[batch_size + 1, heads, key_dim, value_dim]`.

    Where the target computes in blocks (`NeuronConfig.scan_block`) there are an anchor of the same shape and a tail
    `[batch_size + 1, scan_block, width]` (`ScanState`); all recurrences share `[batch_size + 1]` int32 (`ScanRows.scanned`). `width` numbers
    of a token change the state.
    """

    section = "recurrences"
    roles = ("state", "anchor", "tail")
    index: int
    heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def is_selective(self) -> bool:
        """Return whether each column has decays of its own: a token gives a key, values, and as many decays."""
        return self.heads == 1 and self.width == self.key_dim + 2 * self.value_dim

    def list_sizes(self, config: NeuronConfig) -> Iterator[tuple[str, tuple[int, ...], str]]:
        slots = config.batch_size + 1
        shape = (slots, self.heads, self.key_dim, self.value_dim)
        yield "state", shape, "float32"
        if config.scan_block is not None:
            yield "anchor", shape, "float32"
            yield "tail", (slots, config.scan_block, self.width), "float32"

    @classmethod
    def list_common_tensors(cls, config: NeuronConfig) -> Iterator[TensorSpec]:
        if config.scan_block is not None:
            yield TensorSpec("kv_cache.scanned", (config.batch_size + 1,), "int32")

    @classmethod
    def load_backends(cls) -> tuple[Any, Any]:
        from .recurrence import RecurrenceRecorder, SlotScans

        return RecurrenceRecorder, SlotScans.for_step
