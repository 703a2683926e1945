# SPDX-License-Identifier: Apache-2.0
"""Weights of any codes, for tests of kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from optimum_neuron.graphs.quantized.weight import CODE_DTYPES, PACKED, QuantizedWeight


def quantized(
    kind: str, *shape: int, group: int, shifted: bool = False, scale: torch.dtype = torch.float32
) -> QuantizedWeight:
    """Any codes that a weight can have but NaN, with scales of both signs."""
    *others, outputs, inputs = shape
    codes = torch.randint(0, 256, (*others, outputs, inputs // 2 if kind in PACKED else inputs)).to(torch.uint8)
    if kind == "fp8":
        codes[codes % 128 == 127] = 3
    groups = (*others, outputs, inputs // group)
    shift = torch.randn(groups) if shifted else None
    return QuantizedWeight(kind, codes.view(CODE_DTYPES[kind]), torch.randn(groups).to(scale), shift)


def row(weight: QuantizedWeight, rows: slice | int) -> QuantizedWeight:
    shift = None if weight.shift is None else weight.shift[rows]
    return replace(weight, codes=weight.codes[rows], scale=weight.scale[rows], shift=shift)
