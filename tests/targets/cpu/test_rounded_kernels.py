# SPDX-License-Identifier: Apache-2.0
"""Products of codes with activations rounded to int8: the bits of their definition, written out here one number at a time."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from coded_weights import quantized, row
from kernel_calls import Kernels, random, same_bits, with_dtypes
from torch import Tensor

from optimum_neuron.graphs.quantized.modules import reference_product
from optimum_neuron.graphs.quantized.weight import QuantizedWeight


pytestmark = pytest.mark.usefixtures("torch_with_one_thread")
NAN, INFINITY = float("nan"), float("inf")
# Kind, whether there is a shift, and the type of scales.
FORMS = [
    ("int8", False, torch.float32),
    ("int8", True, torch.bfloat16),
    ("int4", False, torch.float16),
    ("int4", True, torch.float16),
]
# Columns, the size of a group, and outputs: groups of one block, of several, and of blocks that are not whole.
SHAPES = [(64, 32, 5), (576, 576, 19), (256, 128, 16), (192, 64, 33), (36, 12, 3), (330, 110, 9), (2080, 2080, 2)]

with_forms = pytest.mark.parametrize(("kind", "shifted", "scale"), FORMS)


@pytest.fixture
def kernels(product_kernels: Kernels) -> Kernels:
    return product_kernels


def rounded(
    kind: str, *shape: int, group: int, shifted: bool = False, scale: torch.dtype = torch.float32
) -> QuantizedWeight:
    """As `quantized`, for activations of int8."""
    return replace(quantized(kind, *shape, group=group, shifted=shifted, scale=scale), activations="int8")


def _fused(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a * b + c, rounded once: exactly, and then to the nearest, ties to even, by way of float64 with its last bit made odd."""
    if not np.isfinite([a, b, c]).all():
        return np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = float(exact)
    if Fraction(near) != exact and not int(np.float64(near).view(np.int64)) & 1:
        toward = np.inf if exact > Fraction(near) else -np.inf
        near = float(np.nextafter(near, toward))
    return np.float32(near)


def _one(x: np.ndarray, weight: QuantizedWeight, output: int) -> np.float32:
    """An output of a row, before its bias."""
    own = row(weight, slice(output, output + 1))
    codes = own.values()[0].numpy().astype(np.int64)
    total, size = np.float32(0), weight.group_size
    for group in range(len(codes) // size):
        inner = ones = np.float32(0)
        for begin in range(group * size, (group + 1) * size, 64):
            block = x[begin : min(begin + 64, (group + 1) * size)]
            largest = np.abs(block).max()
            scale, numbers = largest / np.float32(127), np.zeros(len(block), np.int64)
            if not np.isfinite(largest):
                scale = np.float32(NAN)
            elif scale < np.float32(2.0**-126):
                scale = np.float32(0)
            else:
                numbers = np.rint(block * (np.float32(1) / scale)).astype(np.int64)
            inner = _fused(np.float32(numbers @ codes[begin : begin + len(block)]), scale, inner)
            ones = _fused(np.float32(numbers.sum()), scale, ones)
        total = _fused(inner, np.float32(own.scale[0, group].item()), total)
        if own.shift is not None:
            total = _fused(np.float32(own.shift[0, group].item()), ones, total)
    return total


def defined(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    with np.errstate(all="ignore"):
        sums = [[_one(each, weight, output) for output in range(weight.outputs)] for each in x.float().numpy()]
    wide = torch.from_numpy(np.array(sums, np.float32))
    return (wide if bias is None else wide + bias.float()).to(x.dtype)


def _hard(x: Tensor) -> Tensor:
    """Rows with a block of zeros, of the smallest numbers, of large ones and of ties between two codes."""
    x = x.clone()
    x[1, :32], x[1, -5:] = 0, 0
    x[2] = x[2] * 1e-38
    x[3, 0] = 3e38 if x.dtype != torch.float16 else 6e4
    x[4] = torch.arange(x.shape[1]) % 254 / 2 - 63.5
    x[4, ::16] = 127.0
    return x


@with_dtypes
@with_forms
def test_products_have_the_bits_of_their_definition(
    kernels: Kernels, dtype: torch.dtype, kind: str, shifted: bool, scale: torch.dtype
) -> None:
    for columns, group, outputs in SHAPES:
        weight = rounded(kind, outputs, columns, group=group, shifted=shifted, scale=scale)
        x, bias = _hard(random(6, columns, dtype=dtype)), random(outputs, dtype=dtype)
        (result,) = kernels.quantized_linears(x, [weight], [bias])
        few = slice(0, 3)
        wanted = defined(x, row(weight, few), bias[few])
        assert same_bits(result[:, few], wanted), (columns, group, outputs)
        near = 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(result, reference_product(x, weight, bias), rtol=near, atol=1e-30)
