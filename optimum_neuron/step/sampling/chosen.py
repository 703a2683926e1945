# SPDX-License-Identifier: Apache-2.0
"""The token that each slot chose last, kept on the device: the next step need not wait until a host has read it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ChosenTokens(nn.Module):
    """Buffer `tokens`, `[slots]` int32: state, as the KV cache is."""

    tokens: Tensor

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.zeros(slots, dtype=torch.int32))

    def fill(self, input_ids: Tensor) -> Tensor:
        """Ids of decode rows, `[slots, 1]`: one below 0 stands for the token that its slot chose last."""
        return torch.where(input_ids < 0, self.tokens[:, None], input_ids)

    def keep(self, tokens: Tensor, slots: Tensor) -> None:
        """Notes what rows chose: of several rows of a slot, as a prompt has in one step, the last.

        A selection, not a scatter, whose indices would not be different ones.

        Args:
            tokens: `[rows]` int32.
            slots: `[rows]` int32, as `slots_of_rows`.
        """
        rows = torch.arange(slots.shape[0], dtype=torch.int32)
        every = torch.arange(self.tokens.shape[0], dtype=torch.int32)
        last = torch.where(slots[None, :] == every[:, None], rows, -1).amax(1)
        chosen = torch.where(rows[None, :] == last[:, None], tokens[None, :], -1).amax(1)
        self.tokens.copy_(torch.where(last >= 0, chosen, self.tokens))


def slots_of_rows(position_ids: Tensor, seq_ids: Tensor | None) -> Tensor:
    """`[rows]` int32: whose token each row chooses; -1 where the row idles.

    Args:
        position_ids: `[rows, tokens]`.
        seq_ids: `[rows]`, the slots; None of decode rows, where row i is slot i.
    """
    slots = torch.arange(position_ids.shape[0], dtype=torch.int32) if seq_ids is None else seq_ids
    return torch.where(position_ids[:, 0] >= 0, slots, -1)
