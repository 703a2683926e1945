# SPDX-License-Identifier: Apache-2.0
"""Blocks of GGUF tensors as `QuantizedWeight`: the same numbers as `gguf.quants.dequantize` gives, to the bit.

Layouts: https://github.com/ggml-org/ggml, src/ggml-common.h. Each value there is a code times a scale of its group in float32, less or plus
a minimum, in this order. Blocks `[..., outputs, blocks, bytes]` lie along inputs, so `flatten` from the dimension of blocks on makes rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...step.features.codes.weight import QuantizedWeight, pack_int4


_Parts = tuple[str, Tensor, Tensor, Tensor | None]
# Shifts of the two bits of each number in a byte.
_BY_TWO = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]


def repack(name: str, kind: str, data: Tensor) -> QuantizedWeight:
    """Return blocks `[..., outputs, bytes]` of one of `KINDS` as a weight; raise ValueError where they are not whole, or a scale not finite."""
    size, read = KINDS[kind]
    if not data.numel() or data.shape[-1] % size:
        raise ValueError(f"{name} has outputs of {data.shape[-1]} bytes, and blocks of {kind} have {size}")
    blocks = data.reshape(*data.shape[:-1], -1, size)
    weight_kind, codes, scale, shift = read(blocks)
    for numbers in (scale,) if shift is None else (scale, shift):
        largest = numbers.float().abs().amax().item()
        if not math.isfinite(largest):
            raise ValueError(f"{name} has a scale of {largest}; download or copy the file again")
    codes = pack_int4(codes) if weight_kind == "int4" else codes
    return QuantizedWeight(weight_kind, codes, scale, shift)


def _read_half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 that begins at a byte of each block: `[..., blocks]`."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0]


def _read_nibbles(packed: Tensor) -> Tensor:
    """Return codes `[..., 32]` of blocks of 32: the low halves of 16 bytes, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _of_32(blocks: Tensor, bits: int, *, has_minimum: bool) -> _Parts:
    """Read blocks with a scale, perhaps a minimum, the fifth bits of codes of 5, and 32 codes."""
    start, scale = 4 if has_minimum else 2, _read_half(blocks, 0)
    shift = _read_half(blocks, 2).float() if has_minimum else None
    if bits == 8:
        return "int8", blocks[..., start:].view(torch.int8).flatten(-2), scale, shift
    if bits == 4:
        return "int4", _read_nibbles(blocks[..., start:]).flatten(-2), scale, shift
    fifth = (blocks[..., start : start + 4, None] >> torch.arange(8, dtype=torch.uint8)).flatten(-2) & 1
    codes = (_read_nibbles(blocks[..., start + 4 :]) | (fifth << 4)).view(torch.int8)
    return "int8", (codes if has_minimum else codes - 16).flatten(-2), scale, shift


def _mxfp4(blocks: Tensor) -> _Parts:
    codes = _read_nibbles(blocks[..., 1:])
    packed = (codes[..., ::2] | (codes[..., 1::2] << 4)).flatten(-2)
    return "fp4", packed, blocks[..., 0].contiguous().view(torch.float8_e8m0fnu).to(torch.bfloat16), None


def _k_scales(blocks: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight minima of 6 bits in 12 bytes, times the block's own two: `[..., 8 * blocks]` float32 each."""
    scales, minima, high = blocks[..., start : start + 12].unflatten(-1, (3, 4)).unbind(-2)
    scale = torch.cat((scales & 63, (high & 15) | ((scales >> 2) & 48)), -1)
    minimum = torch.cat((minima & 63, (high >> 4) | ((minima >> 2) & 48)), -1)
    factor, least = _read_half(blocks, 0).float()[..., None], _read_half(blocks, 2).float()[..., None]
    return (factor * scale.float()).flatten(-2), -(least * minimum.float()).flatten(-2)


def _read_pairs(packed: Tensor) -> Tensor:
    """Return codes `[..., blocks, 4, 2, 32]` of 128 bytes: for each 32 bytes first the low halves, then the high ones."""
    parts = packed.unflatten(-1, (4, 32))
    return torch.stack((parts & 15, parts >> 4), -2)


def _q4_k(blocks: Tensor) -> _Parts:
    scale, shift = _k_scales(blocks, 4)
    return "int4", _read_pairs(blocks[..., 16:]).flatten(-4), scale, shift


def _q5_k(blocks: Tensor) -> _Parts:
    scale, shift = _k_scales(blocks, 4)
    high = (blocks[..., 16:48, None] >> torch.arange(8, dtype=torch.uint8)).transpose(-1, -2) & 1
    codes = _read_pairs(blocks[..., 48:]).flatten(-3, -2) | (high << 4)
    return "int8", codes.view(torch.int8).flatten(-3), scale, shift


def _q6_k(blocks: Tensor) -> _Parts:
    low = blocks[..., :128].unflatten(-1, (2, 1, 64))
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> _BY_TWO
    codes = torch.cat((low & 15, low >> 4), -2).flatten(-2).unflatten(-1, (4, 32)) | ((high & 3) << 4)
    scale = blocks[..., 192:208].contiguous().view(torch.int8).float() * _read_half(blocks, 208).float()[..., None]
    return "int8", (codes.view(torch.int8) - 32).flatten(-4), scale.flatten(-2), None


def _read_twos(packed: Tensor) -> Tensor:
    """Return codes of 2 bits `[..., blocks, 2, 4, 32]` of 64 bytes: for each 32 bytes first the lowest bits."""
    return (packed.unflatten(-1, (2, 1, 32)) >> _BY_TWO) & 3


def _q2_k(blocks: Tensor) -> _Parts:
    scale = (blocks[..., :16] & 15).float() * _read_half(blocks, 80).float()[..., None]
    minimum = (blocks[..., :16] >> 4).float() * _read_half(blocks, 82).float()[..., None]
    return "int4", _read_twos(blocks[..., 16:80]).flatten(-4), scale.flatten(-2), -minimum.flatten(-2)


def _q3_k(blocks: Tensor) -> _Parts:
    high = (blocks[..., :32, None] >> torch.arange(8, dtype=torch.uint8)).transpose(-1, -2) & 1
    # 4 more than the value: 4 to 11 are codes of int4 around 8
    codes = _read_twos(blocks[..., 32:96]).flatten(-3, -2) + (high << 2)
    low = torch.cat((blocks[..., 96:104] & 15, blocks[..., 96:104] >> 4), -1)
    two = blocks[..., 104:108, None].transpose(-1, -2) >> _BY_TWO
    scale = (low | ((two.flatten(-2) & 3) << 4)).view(torch.int8) - 32
    scale = scale.float() * _read_half(blocks, 108).float()[..., None]
    return "int4", (codes + 4).flatten(-3), scale.flatten(-2), None


# By gguf's names: bytes of a block, and its reader. Other kinds have values that are no code times a scale.
KINDS: dict[str, tuple[int, Callable[[Tensor], _Parts]]] = {
    "Q8_0": (34, partial(_of_32, bits=8, has_minimum=False)),
    "Q4_0": (18, partial(_of_32, bits=4, has_minimum=False)),
    "Q4_1": (20, partial(_of_32, bits=4, has_minimum=True)),
    "Q5_0": (22, partial(_of_32, bits=5, has_minimum=False)),
    "Q5_1": (24, partial(_of_32, bits=5, has_minimum=True)),
    "MXFP4": (17, _mxfp4),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
