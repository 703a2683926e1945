# SPDX-License-Identifier: Apache-2.0
"""A search for a float32 number, digit by digit.

All products are exact, so no device needs integers of 32 bits, or reads a float's bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .exact_sums import take_part


# The numbers of float32 in their order, by sign and exponent (512 of them) and mantissa.
_EXPONENTS = 256


@dataclass(frozen=True)
class FloatSteps:
    """The steps of a search: each digit's unit and number of values, the highest digit first, of exponent (512) and mantissa (2^23)."""

    exponent: tuple[tuple[float, int], ...]
    mantissa: tuple[tuple[float, int], ...]


def _order_place(place: int) -> tuple[float, float, float]:
    """Return `size`, `first` and `slope` of the place-th sign and exponent in the order of float32, from -inf to inf.

    Its numbers are `size * (first + slope * mantissa)`, in their order from mantissa 0 to 2^23 - 1; each product is exact.
    """
    exponent = place - _EXPONENTS if place >= _EXPONENTS else _EXPONENTS - 1 - place
    size = math.ldexp(1.0, max(exponent, 1) - 127) if exponent < _EXPONENTS - 1 else math.inf
    lead = min(exponent, 1)
    return (size, lead, 2.0**-23) if place >= _EXPONENTS else (-size, lead + 1 - 2.0**-23, -(2.0**-23))


_ORDERED = [_order_place(place) for place in range(2 * _EXPONENTS)]
_SMALLEST = [size * first for size, first, _ in _ORDERED]


def largest_float(found: Callable[[Tensor], Tensor], like: Tensor, steps: FloatSteps) -> Tensor:
    """Return `[rows, 1]`: the largest number that is not too high; minus infinity where all are.

    Args:
        found: counts, of `[rows, n]` numbers in their order, those that are not too high: `[rows, 1]`.
        like: `[rows, 1]` float32.
    """
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
