# SPDX-License-Identifier: Apache-2.0
"""The graph that copies cached tokens from one slot to another on the device: how prefixes are reused there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....step.kv_cache import KVCache
from ....step.step import example_inputs
from ..copy_graphs import COPY_INPUTS, CopyGraph


class SlotCopy(nn.Module):
    """As `step.kv_cache.copy_slot`, with slots and length as inputs: whole rows move, columns beyond the length stay."""

    def __init__(self, graph: CopyGraph) -> None:
        super().__init__()
        self.kv_cache = KVCache(graph.updated)

    def example_inputs(self) -> tuple[Tensor, ...]:
        return example_inputs(COPY_INPUTS)

    def forward(self, source: Tensor, destination: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        """Three `[1]` int32 tensors."""
        for state in self.kv_cache.buffers():
            columns = torch.arange(state.shape[2], dtype=torch.int32)
            kept = (columns < length)[None, None, :, None]
            row = torch.where(kept, state.index_select(0, source), state.index_select(0, destination))
            state.index_put_((destination,), row)
        return ()
