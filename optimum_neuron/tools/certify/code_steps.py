# SPDX-License-Identifier: Apache-2.0
"""Codes of keys and values by their order. The last bit of a number between two codes decides which of them it gets:
that is rounding, and it moves results much further than other rounding does."""

from __future__ import annotations

import torch
from torch import Tensor

from ...step.attention import kv_cache
from ...step.attention.coded_states import LARGEST_CODE, Stored


def as_steps(values: Tensor) -> Tensor:
    """Return fp8 codes as float32 in which neighbours differ by 1, with NaN as NaN; other numbers as float32."""
    if values.dtype != torch.float8_e4m3fn:
        return values.float()
    bits = values.contiguous().view(torch.uint8).float()
    size = bits % 128
    return torch.where(size == 127, torch.nan, torch.where(bits < 128, size, -size))


def write_moved(cache: Stored, states: Tensor, blocks: Tensor, columns: Tensor) -> None:
    """Write as `kv_cache.write_tokens` does, with one code of each token's head replaced by the code next to it."""
    kv_cache.write_rounded(_write_codes, cache, states, blocks, columns)


def _write_codes(cache: Tensor, states: Tensor, blocks: Tensor, columns: Tensor) -> None:
    kv_cache.write_tokens(cache, _move_codes(states) if states.dtype in LARGEST_CODE else states, blocks, columns)


def _move_codes(codes: Tensor) -> Tensor:
    """Move one of the codes `[..., dim]` towards zero, so that none exceeds the largest."""
    heads = codes.contiguous().view(-1, codes.shape[-1])
    chosen = torch.nn.functional.one_hot(torch.arange(len(heads)) % heads.shape[-1], heads.shape[-1]).bool()
    bits = heads.view(torch.uint8)
    if codes.dtype == torch.int8:
        moved = (heads + torch.where(heads > 0, -1, 1)).to(torch.int8).view(torch.uint8)
    else:
        moved = torch.where(bits % 128 == 0, bits + 1, bits - 1)
    return torch.where(chosen, moved, bits).view(codes.dtype).view(codes.shape)
