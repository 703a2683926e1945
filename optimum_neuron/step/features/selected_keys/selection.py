# SPDX-License-Identifier: Apache-2.0
"""A selection of the columns of the largest scores.

Of equal scores at the edge the lowest column is taken first, so a selection is a function of scores and positions. A score that is not
a number counts as infinite: a token that sees a broken one selects it, and gets NaN. No shape follows a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...sampling.float_search import FloatSteps, largest_float


# Few values of a digit are tried at a time: each of them reads all scores.
_BASE = 4
_STEPS = FloatSteps(
    ((128.0, 4), (32.0, 4), (8.0, 4), (2.0, 4), (1.0, 2)),
    (*((2.0**bit, 4) for bit in range(21, 0, -2)), (1.0, 2)),
)


def select_largest(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Return `[rows, columns]` bool: the `count` visible columns of the largest scores, of equal ones the lowest; or all, if they are fewer.

    Args:
        scores: `[rows, columns]` float32; columns that are not visible have no effect.
        visible: `[rows, columns]` bool.
    """
    scores = torch.where(scores.isnan(), torch.inf, scores)

    def count_found(lowest: Tensor) -> Tensor:
        return _reach_count(visible[:, None] & (scores[:, None] >= lowest[..., None]), count)

    smallest = largest_float(count_found, scores[:, :1], _STEPS)
    above = visible & (scores > smallest)
    tied = visible & (scores >= smallest) & ~above
    room = count - above.float().sum(-1, keepdim=True)
    column = torch.arange(scores.shape[-1], dtype=torch.int32).float()
    return above | (tied & (column < _find_bound(tied, column, room)))


def _reach_count(counted: Tensor, count: int) -> Tensor:
    """Return `[rows, 1]`: in how many of `[rows, n, columns]` there are at least `count` columns."""
    return (counted.float().sum(-1) >= count).float().sum(-1, keepdim=True)


def _find_bound(tied: Tensor, column: Tensor, room: Tensor) -> Tensor:
    """Return `[rows, 1]`: the largest number of first columns of which no more than `room [rows, 1]` are tied."""
    bound, unit = torch.zeros_like(room), 1
    while unit * _BASE <= tied.shape[-1]:
        unit *= _BASE
    while unit:
        tried = bound + float(unit) * torch.arange(1, _BASE, dtype=torch.float32)
        before = (tied[:, None] & (column < tried[..., None])).float().sum(-1)
        bound = bound + float(unit) * (before <= room).float().sum(-1, keepdim=True)
        unit //= _BASE
    return bound
