# SPDX-License-Identifier: Apache-2.0
"""Weights of any codes, for tests of kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from kernel_calls import Kernels, Weight, parts_of
from torch import Tensor

from optimum_neuron.step.features.codes.weight import CODE_DTYPES, PACKED, UNUSED_SCALE_BITS, QuantizedWeight


SHORT = "short"


def quantized(
    kind: str,
    *shape: int,
    group: int,
    shifted: bool = False,
    scale: torch.dtype | str = torch.float32,
    activations: str | None = None,
) -> QuantizedWeight:
    """Any codes that a weight can have but NaN, with scales of both signs.

    Args:
        scale: their type; or SHORT, those of float16 that are so.
    """
    *others, outputs, inputs = shape
    codes = torch.randint(0, 256, (*others, outputs, inputs // 2 if kind in PACKED else inputs)).to(torch.uint8)
    if kind == "fp8":
        codes[codes % 128 == 127] = 3
    groups = (*others, outputs, inputs // group)
    shift = torch.randn(groups) if shifted else None
    scales = torch.randn(groups)
    own = shortened(scales) if isinstance(scale, str) else scales.to(scale)
    return QuantizedWeight(kind, codes.view(CODE_DTYPES[kind]), own, shift, activations)


def shortened(scales: Tensor) -> Tensor:
    return (scales.half().view(torch.int16) & ~UNUSED_SCALE_BITS).view(torch.float16)


def row(weight: QuantizedWeight, rows: slice | int) -> QuantizedWeight:
    shift = None if weight.shift is None else weight.shift[rows]
    return replace(weight, codes=weight.codes[rows], scale=weight.scale[rows], shift=shift)


def experts_by_linears(kernels: Kernels, x: Tensor, index: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """What linear layers make of the rows of each expert, and zero where an index is none of an expert."""
    rows = x[:, None].expand(*index.shape, x.shape[-1]) if x.dim() == 2 else x
    plain, _ = parts_of(weight)
    output = torch.zeros((*index.shape, plain.shape[1]), dtype=x.dtype)
    for expert in set(index.flatten().tolist()) & {*range(len(plain))}:
        own = weight[expert] if isinstance(weight, Tensor) else row(weight, expert)
        chosen = rows[index == expert].contiguous()
        output[index == expert] = kernels.linear(chosen, own, None if bias is None else bias[expert])
    return output
