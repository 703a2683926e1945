# SPDX-License-Identifier: Apache-2.0
"""Runs of the graphs that are no steps, of which nothing changes: the first run of a graph is slow."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ..graph_io import SAMPLERS, GraphIO
from ..score_graphs import slots_input


# A row that chooses for no slot; a copy of nothing is zeros.
_NO_SLOT = dict.fromkeys(map(slots_input, SAMPLERS), -1)


def idle_inputs(graphs: Mapping[str, GraphIO], steps: Collection[str]) -> dict[str, list[Tensor]]:
    """Return what `Executable.idle_inputs` returns; `steps` are the names of graphs that are steps."""
    return {
        name: [
            torch.full(each.shape, _NO_SLOT.get(each.name, 0), dtype=getattr(torch, each.dtype))
            for each in io.inputs
            if each.role == "input"
        ]
        for name, io in graphs.items()
        if name not in steps
    }
