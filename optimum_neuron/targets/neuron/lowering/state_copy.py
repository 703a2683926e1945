# SPDX-License-Identifier: Apache-2.0
"""The graphs that copy what a slot keeps of all its tokens on the device: to a snapshot's place, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....step.kv_cache import KVCache
from ....step.spec import TensorSpec
from ....step.step import example_inputs
from ..copy_graphs import COPY_INPUTS, CopyGraph
from ..graph_io import CACHE, SNAPSHOTS


class StateCopy(nn.Module):
    """As `HostStates.keep_state` and `restore_state`, with both rows as inputs.

    A row is selected whole and written over the other, whatever that holds: nothing is computed with either.
    """

    def __init__(self, graph: CopyGraph) -> None:
        super().__init__()
        # Named so, buffers are called what the states are.
        self.kv_cache = KVCache(each for each in graph.states if each.name.startswith(CACHE))
        self.snapshots = nn.Module()
        kept = [each for each in graph.states if each.name.startswith(SNAPSHOTS)]
        self.snapshots.kv_cache = KVCache(
            TensorSpec(each.name.removeprefix(SNAPSHOTS), each.shape, each.dtype) for each in kept
        )
        self._names = [(one.name, other.name) for one, other in zip(graph.read, graph.updated, strict=True)]

    def example_inputs(self) -> tuple[Tensor, ...]:
        return example_inputs(COPY_INPUTS)

    def forward(self, source: Tensor, destination: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        """Three `[1]` int32 tensors."""
        for read, updated in self._names:
            one, other = self.get_buffer(read), self.get_buffer(updated)
            copied = (length > 0).view([1] * other.dim())
            row = torch.where(copied, one.index_select(0, source), other.index_select(0, destination))
            other.index_put_((destination,), row)
        return ()
