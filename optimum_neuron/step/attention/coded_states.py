# SPDX-License-Identifier: Apache-2.0
"""Keys and values as codes of 8 bits, with a scale for each head of a token.

A token's codes follow from its own numbers alone, so neither chunks nor neighbours change them. No product multiplies a code by its
scale: a key's scale is applied to its score, and a value's is part of the weight that it is summed with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


# The largest number of a code, before it is scaled, by type. e4m3 ends at 448 on most chips, and at 240 on trn2:
# one number for all gives all targets the same codes, and costs one of 16 exponents.
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 240.0}
# Heads of which no number is larger are zeros: their scale would be no normal number in float32.
SMALLEST_HEAD = 2.0**-100


@dataclass(frozen=True)
class CodedStates:
    """Keys or values: `codes [..., dim]` int8 or float8_e4m3fn times `scale [..., 1]` float32; NaN where a number is not finite."""

    codes: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __getitem__(self, index: Any) -> CodedStates:
        return CodedStates(self.codes[index], self.scale[index])

    def index_select(self, dim: int, index: Tensor) -> CodedStates:
        return CodedStates(self.codes.index_select(dim, index), self.scale.index_select(dim, index))

    def __len__(self) -> int:
        return len(self.codes)

    def dequantize(self) -> Tensor:
        return self.codes.float() * self.scale


# A layer's keys or values, as its cache has them.
Stored = Tensor | CodedStates


def round_states(states: Tensor, dtype: torch.dtype) -> CodedStates:
    """Return codes of a type in `LARGEST_CODE` for `states [..., dim]`: a head's scale is its largest number over the largest code."""
    numbers, largest_code = states.float(), LARGEST_CODE[dtype]
    largest = numbers.abs().amax(-1, keepdim=True)
    scale = torch.where(largest < SMALLEST_HEAD, 1.0, largest / largest_code)
    broken = scale - scale  # NaN where a number is not finite; not a constant, which devices refuse
    codes = torch.where(broken == 0, numbers / scale, 0.0)
    if dtype == torch.int8:  # to the nearest whole numbers, ties to even, by operators that every target has
        below = torch.floor(codes)
        rest, odd = codes - below, below - 2.0 * torch.floor(below * 0.5)
        codes = below + torch.where(rest == 0.5, odd, (rest > 0.5).float())
    return CodedStates(codes.clamp(-largest_code, largest_code).to(dtype), scale + broken)


def as_kept(states: Tensor, cache: Stored) -> Stored:
    """Return the keys or values of new tokens as they will be read from their cache."""
    return states if isinstance(cache, Tensor) else round_states(states, cache.codes.dtype)


def numbers(states: Stored) -> Tensor:
    """Return the numbers that states stand for, in float32."""
    return states.float() if isinstance(states, Tensor) else states.dequantize()


def raw_scores(query: Tensor, keys: Stored, dtype: torch.dtype) -> Tensor:
    """Return `query [..., n, dim]` times `keys [..., columns, dim]`, `[..., n, columns]` float32; codes are exact in `dtype`, and multiply in it."""
    if isinstance(keys, Tensor):
        return (query @ keys.transpose(-1, -2)).float()
    scores = query.to(dtype) @ keys.codes.to(dtype).transpose(-1, -2)
    return scores.float() * keys.scale.transpose(-1, -2)


def weighted_sum(weights: Tensor, values: Stored, dtype: torch.dtype) -> Tensor:
    """Sum `values [..., columns, dim]` by `weights [..., n, columns]` float32: `[..., n, dim]`, rounded as products of codes in `dtype` are."""
    if isinstance(values, Tensor):
        return weights.to(values.dtype) @ values
    return (weights * values.scale.transpose(-1, -2)).to(dtype) @ values.codes.to(dtype)
