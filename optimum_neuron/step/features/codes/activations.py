# SPDX-License-Identifier: Apache-2.0
"""Products of codes with activations rounded to int8: the definition that every target computes, to float32 rounding.

Each group of a weight's inputs (where an output has one scale: all of them) is cut into blocks of `BLOCK` from its first input on, of which
the last may be shorter. A token's activations in a block become codes -127 to 127 with a scale of their own. Sums of a block are whole
numbers, exactly; they are scaled and added in float32, in one order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .weight import QuantizedWeight


BLOCK = 64
LARGEST_CODE = 127
# Below it no scale has an inverse that is a normal number: the block counts as zeros.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def round_block(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of int8 and scales of blocks.

    Args:
        x: `[..., n]` float32, a block in each row.

    Returns:
        `[..., n]` float32, whole numbers; `[..., 1]` float32: NaN where the block holds NaN or infinity, whose codes are zeros.
    """
    largest = x.abs().amax(-1, keepdim=True)
    scale = largest / LARGEST_CODE
    usable = (scale >= SMALLEST_SCALE) & scale.isfinite()
    inverse = torch.where(usable, torch.ones_like(scale) / torch.where(usable, scale, 1.0), 0.0)
    codes = torch.where(usable, torch.round(torch.where(usable, x, 0.0) * inverse), 0.0)
    scale = torch.where(usable, scale, torch.where(largest.isfinite(), 0.0, torch.nan))
    return codes, scale


def integer_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """`[..., outputs]` float32 of x `[..., inputs]` and a weight `[outputs, inputs]` of int8 or int4."""
    rows = x.reshape(-1, weight.inputs).float()
    values, size = weight.values(), weight.group_size
    total = rows.new_zeros((len(rows), weight.outputs))
    for group, first in enumerate(range(0, weight.inputs, size)):
        product, ones = torch.zeros_like(total), rows.new_zeros((len(rows), 1))
        for begin in range(first, first + size, BLOCK):
            end = min(begin + BLOCK, first + size)
            codes, scale = round_block(rows[:, begin:end])
            # Whole numbers below 2^24, in whatever order they are added.
            product = _multiply_add(torch.matmul(codes, values[:, begin:end].t()), scale, product)
            ones = _multiply_add(codes.sum(-1, keepdim=True), scale, ones)
        total = _multiply_add(product, weight.scale[:, group].float(), total)
        if weight.shift is not None:
            total = _multiply_add(ones, weight.shift[:, group], total)
    return total.reshape(*x.shape[:-1], weight.outputs)


def _multiply_add(left: Tensor, right: Tensor, added: Tensor) -> Tensor:
    """Of float32 tensors. The product is exact in float64, so that its sum is rounded nearly as a fused operation does it."""
    return (left.double() * right.double() + added.double()).float()
