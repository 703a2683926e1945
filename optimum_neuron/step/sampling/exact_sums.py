# SPDX-License-Identifier: Apache-2.0
"""Exact sums of whole numbers in float32.

A number is `[..., digits]` in base 4096, the highest digit first. A digit may be any whole number of up to 24 bits, as far as float32
is exact. No device needs integers wider than that.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


BASE = 4096.0
# So many digits of base 4096 add up to 24 bits.
_BLOCK = 4096
# A block is cut into so many parts, and they again, to find a token in it.
_GROUP = 16


def to_digits(number: Tensor, count: int) -> Tensor:
    """Return `[..., count]` digits of a float32 number that is whole and not negative."""
    digits = []
    for place in range(count - 1, 0, -1):
        digit = (number * BASE**-place).floor()
        number = number - digit * BASE**place
        digits.append(digit)
    return torch.stack([*digits, number], dim=-1)


def to_float(digits: Tensor) -> Tensor:
    """Return `[...]` float32 of `[..., digits]`, rounded after each digit."""
    digits = _carry_digits(digits)
    number = digits[..., 0]
    for place in range(1, digits.shape[-1]):
        number = number * BASE + digits[..., place]
    return number


def _carry_digits(digits: Tensor) -> Tensor:
    """Return the same numbers with all digits but the highest below 4096."""
    whole = list(digits.unbind(-1))
    for place in range(len(whole) - 1, 0, -1):
        over = (whole[place] * (1 / BASE)).floor()
        whole[place] = whole[place] - over * BASE
        whole[place - 1] = whole[place - 1] + over
    return torch.stack(whole, dim=-1)


def widen_digits(digits: Tensor) -> Tensor:
    """Return the same numbers with a digit more, all below 8192, so that many of them can be added."""
    over = (digits * (1 / BASE)).floor()
    return pad(over, (0, 1)) + pad(digits - over * BASE, (1, 0))


def is_less(left: Tensor, right: Tensor) -> Tensor:
    """Return `[...]` bool: the sign of the difference is that of its highest digit, when the others are not negative."""
    difference = left - right
    highest = difference[..., -1]
    for place in range(difference.shape[-1] - 2, -1, -1):
        highest = difference[..., place] + (highest * (1 / BASE)).floor()
    return highest < 0


def pad_tokens(tokens: Tensor, fill: float) -> Tensor:
    """Return `[..., size]` as `blocks` takes it, with `fill` after the tokens."""
    size = tokens.shape[-1]
    return pad(tokens, (0, -size % (_GROUP**2 if size <= _BLOCK else _BLOCK)), value=fill)


def split_blocks(planes: Tensor) -> Tensor:
    """Return `[..., blocks, groups, 16, 16]` of `[..., size]`, padded; a block has at most 4096 tokens."""
    groups = min(planes.shape[-1], _BLOCK) // _GROUP**2
    return planes.unflatten(-1, (-1, groups, _GROUP, _GROUP))


def sum_tokens(planes: Tensor) -> Tensor:
    """Return `[rows, ..., digits]`: the sums of tokens' numbers, `[digits, rows, ..., size]`, padded.

    It has a digit more than they, unless that is one: those number tokens.
    """
    of_blocks = split_blocks(planes).sum((-3, -2, -1)).movedim(0, -1)
    return (widen_digits(of_blocks) if of_blocks.shape[-1] > 1 else of_blocks).sum(-2)


def pick_part(sums: Tensor, base: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first of some parts that reaches beyond `target`, `[rows]` float32, and the sum before it, `[rows, digits]`.

    Args:
        sums: `[rows, parts, digits]`, of each part, in order.
        base: `[rows, digits]`, the sum before the first.
        target: `[rows, digits]`, from `base` on, and less than the end of the last.
    """
    if sums.shape[1] == 1:
        return torch.zeros_like(base[:, 0]), base
    order = torch.arange(sums.shape[1], dtype=torch.int32)
    before = (order[None, :] < order[:, None])[None, :, :, None]
    starts = base[:, None] + torch.where(before, sums[:, None], 0.0).sum(2)
    # The last part that begins at `target` or before; a part of nothing begins where the next one does.
    index = (~is_less(target[:, None], starts)).float().sum(-1) - 1
    return index, take_part(starts, index)


def take_part(numbers: Tensor, index: Tensor) -> Tensor:
    """Return each row's part: `[rows, digits]` of `[rows, parts, digits]`."""
    order = torch.arange(numbers.shape[1], dtype=torch.int32)
    return torch.where((order == index[:, None])[..., None], numbers, 0.0).sum(1)
