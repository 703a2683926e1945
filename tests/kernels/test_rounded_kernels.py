# SPDX-License-Identifier: Apache-2.0
"""Products of codes with activations rounded to int8: the bits of their definition, written out here one number at a time."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from coded_weights import quantized, row
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import DTYPES, Kernels, Planned, Tensors, guarded, random, same_bits, with_dtypes
from torch import Tensor, nn

from optimum_neuron.kernels.steps.access import PlanError
from optimum_neuron.kernels.steps.steps import Layer, Linears
from optimum_neuron.step.features.codes.modules import QuantizedLinear, multiplying, reference_product
from optimum_neuron.step.features.codes.weight import CODE_DTYPES, QuantizedWeight
from optimum_neuron.targets.cpu.ops import OPS


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
    return quantized(kind, *shape, group=group, shifted=shifted, scale=scale, activations="int8")


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


@with_forms
def test_rows_of_many_blocks_have_the_same_bits_however_many_there_are(
    kernels: Kernels, kind: str, shifted: bool, scale: torch.dtype
) -> None:
    """Blocks of several turns, and groups that end within one, for tiles of few rows and batches of many."""
    for columns, group in ((2080, 2080), (2080, 32), (1152, 64), (1300, 130)):
        weight = rounded(kind, 35, columns, group=group, shifted=shifted, scale=scale)
        x = random(600, columns, dtype=torch.float32)
        (whole,) = kernels.quantized_linears(x, [weight], [None])
        few = slice(33, 34)
        assert same_bits(whole[597:598, few], defined(x[597:598], row(weight, few), None)), (columns, group)
        for rows in (1, 4, 5, 16, 17, 40):
            (fewer,) = kernels.quantized_linears(x[-rows:].contiguous(), [weight], [None])
            assert same_bits(fewer, whole[-rows:]), (columns, group, rows)


def test_the_largest_codes_are_summed_exactly(kernels: Kernels) -> None:
    """Sums of pairs of them are as large as 16 bits hold."""
    for kind, code in product(("int8", "int4"), (0, 0x7F, 0x80, 0xFF, 0x0F, 0xF0)):
        columns = 256 if kind == "int8" else 128
        codes = torch.full((20, columns if kind == "int8" else columns // 2), code, dtype=torch.uint8)
        weight = QuantizedWeight(
            kind, codes.view(CODE_DTYPES[kind]), torch.ones(20, columns // 64), activations="int8"
        )
        for rows in (1, 7):
            x = torch.full((rows, columns), -127.0)
            (result,) = kernels.quantized_linears(x, [weight], [None])
            assert torch.equal(result, torch.full((rows, 20), -127.0 * weight.values()[0].sum().item())), (kind, code)


@examples(100)
@given(st.sampled_from(FORMS), st.sampled_from(DTYPES), st.data())
def test_no_size_or_place_changes_a_bit_of_the_definition(
    best_kernels: Kernels, form: tuple[str, bool, torch.dtype], dtype: torch.dtype, data: st.DataObject
) -> None:
    kind, shifted, scale = form
    group = data.draw(st.one_of(st.sampled_from([16, 32, 64, 128, 640]), st.integers(1, 300)), "group")
    group *= 2 if kind == "int4" and group % 2 else 1
    columns = group * data.draw(st.integers(1, max(1, 1200 // group)), "groups")
    outputs, rows = data.draw(st.integers(1, 150), "outputs"), data.draw(st.integers(1, 60), "rows")
    weight = rounded(kind, outputs, columns, group=group, shifted=shifted, scale=scale)
    x, bias = random(rows, columns, dtype=dtype), random(outputs, dtype=dtype)
    with best_kernels.with_threads(data.draw(st.integers(1, 3), "threads")):
        (whole,) = best_kernels.quantized_linears(x, [weight], [bias])
    place, output = data.draw(st.integers(0, rows - 1), "row"), data.draw(st.integers(0, outputs - 1), "output")
    own, few = slice(place, place + 1), slice(output, output + 1)
    assert same_bits(whole[own, few], defined(x[own], row(weight, few), bias[few]))
    assert same_bits(best_kernels.quantized_linears(x[own], [weight], [bias])[0], whole[own])


class _Layers(nn.Module):
    """Layers of one input, of which two round it alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            QuantizedLinear(each)
            for each in (
                rounded("int4", 24, 64, group=32),
                quantized("int4", 24, 64, group=32),
                rounded("int4", 40, 64, group=32, shifted=True),
            )
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        own = x * 2
        return tuple(layer(own) for layer in self.layers)


@with_dtypes
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_layers_of_a_graph_are_one_step_where_activations_are_rounded_alike(
    best_kernels: Kernels, dtype: torch.dtype, rows: int
) -> None:
    module, x = _Layers(), random(1, rows, 64, dtype=dtype)
    with multiplying(OPS.quantized_linear):
        planned = Planned(best_kernels, module, [x])
    steps = [step for step in planned.plan.steps if isinstance(step, Linears)]
    assert [[layer.codes and layer.codes.activations for layer in step.layers] for step in steps] == [
        ["int8", "int8"],
        [None],
    ]
    assert not planned.calls_torch
    for result, wanted in zip(planned(x), module(x), strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-2)


def test_activations_that_no_kernel_rounds_are_refused(best_kernels: Kernels) -> None:
    weights, x = {kind: quantized(kind, 8, 64, group=64) for kind in ("int8", "fp8")}, torch.randn(3, 64)

    def run(*layers: tuple[str, str | None]) -> None:
        tensors = Tensors()
        step = Linears(
            tensors(x),
            tuple(
                Layer(
                    tensors(weights[kind].codes),
                    None,
                    tensors(guarded((3, 8), torch.float32)),
                    replace(tensors.codes(weights[kind]), activations=activations),
                )
                for kind, activations in layers
            ),
        )
        best_kernels.run(step, tensors)

    run(("int8", "int8"), ("int8", "int8"))
    with pytest.raises(PlanError, match="activations of int4 with a weight of int8"):
        run(("int8", "int4"))
    with pytest.raises(PlanError, match="activations of int8 with a weight of fp8"):
        run(("fp8", "int8"))
    with pytest.raises(PlanError, match="quantized in several ways"):
        run(("int8", "int8"), ("int8", None))
    with pytest.raises(
        ValueError, match="activations of int8 do not meet codes of fp8: those of int8 meet int8 and int4"
    ):
        replace(weights["fp8"], activations="int8")
