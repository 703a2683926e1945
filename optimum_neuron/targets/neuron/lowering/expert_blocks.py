# SPDX-License-Identifier: Apache-2.0
"""Which place in an expert's blocks each of its tokens gets: counted without a sort, a cumulative sum or a division.

All numbers are whole and below 2^24, where float32 is exact, and so are sums in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


# Tokens that one product with a triangle counts.
_COUNTED = 128


def block_places(index: Tensor, experts: int, rows: int, gathered: int) -> tuple[Tensor, Tensor]:
    """Gives each entry of a routing a place in a block of its expert; no two get the same.

    Block e is the first of expert e; behind them are `gathered` others, in the order of their experts.

    Args:
        index: `[tokens, k]`, whole numbers; from `experts` on: nowhere.
        rows: of a block, a power of two.

    Returns:
        `[tokens, k]` int32, block * rows + row, anything where an entry goes nowhere; and `[gathered]` int32, the expert of
        each further block, any where it is not in use.
    """
    order = torch.arange(experts, dtype=torch.int32)
    chosen = index[:, :, None] == order  # [tokens, k, experts]
    counts = chosen.sum(1, dtype=torch.float32)
    total = counts.sum(0)
    position = _of(chosen, earlier_sums(counts)[:, None]) + _earlier_in_row(index)
    block = (position * (1 / rows)).floor()
    further = ((total - 1).clamp(min=0) * (1 / rows)).floor()  # of each expert, beyond its first
    start = torch.where(order < order[:, None], further, 0.0).sum(1)
    numbers = torch.arange(gathered, dtype=torch.float32)
    owners = ((start + further) <= numbers[:, None]).sum(1, dtype=torch.float32).clamp(max=experts - 1)
    first = _of(chosen, order.float())
    moved = torch.where(block > 0, experts + _of(chosen, start) + block - 1, first)
    return (moved * rows + position - block * rows).to(torch.int32), owners.to(torch.int32)


def earlier_sums(counts: Tensor) -> Tensor:
    """`[tokens, n]` float32: of each column what stands before a row."""
    tokens, width = counts.shape
    groups = pad(counts, (0, 0, 0, -tokens % _COUNTED)).view(-1, _COUNTED, width)
    order = torch.arange(_COUNTED, dtype=torch.int32)
    within = (order < order[:, None]).float().expand(len(groups), -1, -1) @ groups
    if len(groups) > 1:
        number = torch.arange(len(groups), dtype=torch.int32)
        before = (number < number[:, None])[:, :, None]
        within = within + torch.where(before, groups.sum(1), 0.0).sum(1)[:, None]
    return within.flatten(0, 1)[:tokens]


def _earlier_in_row(index: Tensor) -> Tensor:
    """`[tokens, k]` float32: how often a token's earlier places name the same expert; routers name each once."""
    order = torch.arange(index.shape[1], dtype=torch.int32)
    return ((index[:, :, None] == index[:, None]) & (order < order[:, None])).sum(-1, dtype=torch.float32)


def _of(chosen: Tensor, values: Tensor) -> Tensor:
    """`[tokens, k]`: of the chosen expert."""
    return torch.where(chosen, values, 0.0).sum(-1)
