# SPDX-License-Identifier: Apache-2.0
"""Exact arithmetic of whole numbers in float32, and a search for a float32 number, digit by digit.

A number is `[..., digits]` in base 4096, the highest digit first. A digit may be any whole number of up to 24 bits, as far as float32
is exact. All products are exact. No device needs integers wider than that, or reads a float's bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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
    whole = list(digits.unbind(-1))
    for place in range(len(whole) - 1, 0, -1):  # carry, so that all but the highest are below 4096
        over = (whole[place] * (1 / BASE)).floor()
        whole[place] = whole[place] - over * BASE
        whole[place - 1] = whole[place - 1] + over
    digits = torch.stack(whole, dim=-1)
    number = digits[..., 0]
    for place in range(1, digits.shape[-1]):
        number = number * BASE + digits[..., place]
    return number


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
    """Return `[rows, ..., digits]`: sums of `[digits, rows, ..., size]`, padded; with a digit more, unless that is one."""
    of_blocks = split_blocks(planes).sum((-3, -2, -1)).movedim(0, -1)
    return (widen_digits(of_blocks) if of_blocks.shape[-1] > 1 else of_blocks).sum(-2)


def pick_part(sums: Tensor, base: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first of some parts that reaches beyond `target`, `[rows]` float32, and the sum before it, `[rows, digits]`.

    `sums [rows, parts, digits]` belong to each part in order, `base [rows, digits]` is the sum before the first. `target [rows, digits]` is
    from `base` on, and less than the end of the last.
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


# The numbers of float32 in their order, by sign and exponent (512 of them) and mantissa.
_EXPONENTS = 256


@dataclass(frozen=True)
class FloatSteps:
    """The steps of a search: each digit's unit and number of values, the highest digit first, of exponent (512) and mantissa (2^23)."""

    exponent: tuple[tuple[float, int], ...]
    mantissa: tuple[tuple[float, int], ...]


def _order_place(place: int) -> tuple[float, float, float]:
    """Return `size`, `first` and `slope` of the place-th sign and exponent in the order of float32, from -inf to inf.

    Its numbers are `size * (first + slope * mantissa)`, from mantissa 0 to 2^23 - 1; each product is exact.
    """
    exponent = place - _EXPONENTS if place >= _EXPONENTS else _EXPONENTS - 1 - place
    size = math.ldexp(1.0, max(exponent, 1) - 127) if exponent < _EXPONENTS - 1 else math.inf
    lead = min(exponent, 1)
    return (size, lead, 2.0**-23) if place >= _EXPONENTS else (-size, lead + 1 - 2.0**-23, -(2.0**-23))


_ORDERED = [_order_place(place) for place in range(2 * _EXPONENTS)]
_SMALLEST = [size * first for size, first, _ in _ORDERED]


def largest_float(found: Callable[[Tensor], Tensor], like: Tensor, steps: FloatSteps) -> Tensor:
    """Return `[rows, 1]`: the largest number that is not too high; `found` counts those that are not, of `[rows, n]` in their order."""
    smallest, places = torch.tensor(_SMALLEST)[None, :, None], torch.tensor(_ORDERED)[None]
    exponent = mantissa = torch.zeros_like(like)
    for unit, count in steps.exponent:
        tried = exponent + unit * torch.arange(1, count, dtype=torch.float32)
        exponent = exponent + unit * found(take_part(smallest, tried.flatten()).unflatten(0, (-1, count - 1))[..., 0])
    size, first, slope = take_part(places, exponent[:, 0])[:, None].unbind(-1)
    for unit, count in steps.mantissa:
        tried = mantissa + unit * torch.arange(1, count, dtype=torch.float32)
        mantissa = mantissa + unit * found(size * (first + slope * tried))
    return size * (first + slope * mantissa)
