# SPDX-License-Identifier: Apache-2.0
"""What a step's head returned for each row, left where a sampler in a graph of its own finds it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..spec import CHUNK, DECODE, GraphSpec


class Scores(nn.Module):
    """Buffers `decode` and `chunk`, `[rows, columns]` float32: state, as the KV cache is.

    Args:
        groups: the groups of rows that there are, and how many of each.
        columns: of the logits; of a rank's part of them.
    """

    def __init__(self, groups: Iterable[tuple[str, int]], columns: int) -> None:
        super().__init__()
        for group, rows in groups:
            self.register_buffer(group, torch.zeros(rows, columns))

    @classmethod
    def of(cls, spec: GraphSpec, columns: int) -> Scores | None:
        """Those of the groups that a step graph has; None where the host chooses tokens."""
        if not spec.on_device_sampling:
            return None
        groups = ((DECODE, spec.batch_size, spec.has_decode), (CHUNK, spec.ctx_batch_size, spec.has_chunk))
        return cls([(group, rows) for group, rows, present in groups if present], columns)

    def keep(self, group: str, logits: Tensor, active: Tensor) -> None:
        """Replaces those of a group's active rows, `[rows]` bool. A runtime wants a state read that is written."""
        kept: Tensor = getattr(self, group)
        kept.copy_(torch.where(active[:, None], logits, kept))
