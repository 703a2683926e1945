# SPDX-License-Identifier: Apache-2.0
"""Codes of keys and values by their order. Where a number lies between two codes, its last bit decides which it gets: that is rounding, and
moves what is computed by much more than other rounding does."""

from __future__ import annotations

import torch
from torch import Tensor

from ...step import kv_cache
from ...step.features.codes.coded_states import LARGEST_CODE, Stored


def as_steps(values: Tensor) -> Tensor:
    """Codes as float32 in which neighbours differ by 1, NaN where one is no number; other numbers as they are, in float32."""
    if values.dtype != torch.float8_e4m3fn:
        return values.float()
    bits = values.contiguous().view(torch.uint8).float()
    size = bits % 128
    return torch.where(size == 127, torch.nan, torch.where(bits < 128, size, -size))


def write_moved(cache: Stored, states: Tensor, blocks: Tensor, columns: Tensor) -> None:
    """As `kv_cache.write`, but that of each token's head a number has the code next to its own."""
    kv_cache.write_rounded(_put, cache, states, blocks, columns)


def _put(cache: Tensor, states: Tensor, blocks: Tensor, columns: Tensor) -> None:
    kv_cache.write(cache, _moved(states) if states.dtype in LARGEST_CODE else states, blocks, columns)


def _moved(codes: Tensor) -> Tensor:
    """Codes `[..., dim]`: nearer to zero, so that none is beyond the largest, or beside it."""
    heads = codes.contiguous().view(-1, codes.shape[-1])
    chosen = torch.nn.functional.one_hot(torch.arange(len(heads)) % heads.shape[-1], heads.shape[-1]).bool()
    bits = heads.view(torch.uint8)
    if codes.dtype == torch.int8:
        moved = (heads + torch.where(heads > 0, -1, 1)).to(torch.int8).view(torch.uint8)
    else:
        moved = torch.where(bits % 128 == 0, bits + 1, bits - 1)
    return torch.where(chosen, moved, bits).view(codes.dtype).view(codes.shape)
