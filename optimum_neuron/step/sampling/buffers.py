# SPDX-License-Identifier: Apache-2.0
"""Buffers of a step for sampling: the token that each slot chose last, and logits for a sampler in a graph of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..spec import CHUNK, DECODE, GraphSpec


class ChosenTokens(nn.Module):
    """A buffer `tokens`, `[slots]` int32: state, as the KV cache is."""

    tokens: Tensor

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.zeros(slots, dtype=torch.int32))

    def fill_ids(self, input_ids: Tensor) -> Tensor:
        """Return ids of decode rows, `[slots, 1]`: one below 0 stands for the token that its slot chose last."""
        return torch.where(input_ids < 0, self.tokens[:, None], input_ids)

    def keep_tokens(self, tokens: Tensor, slots: Tensor) -> None:
        """Keep the tokens that rows chose, `[rows]` int32, of a slot's rows the last: by selections, as indices may be equal."""
        rows = torch.arange(slots.shape[0], dtype=torch.int32)
        every = torch.arange(self.tokens.shape[0], dtype=torch.int32)
        last = torch.where(slots[None, :] == every[:, None], rows, -1).amax(1)
        chosen = torch.where(rows[None, :] == last[:, None], tokens[None, :], -1).amax(1)
        self.tokens.copy_(torch.where(last >= 0, chosen, self.tokens))


def slots_of_rows(position_ids: Tensor, seq_ids: Tensor | None) -> Tensor:
    """Return `[rows]` int32, the slot of each row, from `position_ids [rows, tokens]`; -1 where the row idles. Decode rows have no `seq_ids`."""
    slots = torch.arange(position_ids.shape[0], dtype=torch.int32) if seq_ids is None else seq_ids
    return torch.where(position_ids[:, 0] >= 0, slots, -1)


class Scores(nn.Module):
    """Buffers `decode` and `chunk`, `[rows, columns]` float32: state, as the KV cache is. A rank has columns of its own logits."""

    def __init__(self, groups: Iterable[tuple[str, int]], columns: int) -> None:
        super().__init__()
        for group, rows in groups:
            self.register_buffer(group, torch.zeros(rows, columns))

    @classmethod
    def for_graph(cls, spec: GraphSpec, columns: int) -> Scores | None:
        """Return those of a step graph's groups; None where the host chooses tokens."""
        if not spec.on_device_sampling:
            return None
        groups = ((DECODE, spec.batch_size, spec.has_decode), (CHUNK, spec.ctx_batch_size, spec.has_chunk))
        return cls([(group, rows) for group, rows, present in groups if present], columns)

    def keep_logits(self, group: str, logits: Tensor, active: Tensor) -> None:
        """Replace those of a group's active rows, `[rows]` bool. A runtime wants a state read that is written."""
        kept: Tensor = getattr(self, group)
        kept.copy_(torch.where(active[:, None], logits, kept))
