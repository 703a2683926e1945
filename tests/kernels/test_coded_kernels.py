# SPDX-License-Identifier: Apache-2.0
"""The kernels of quantized weights: near float64 with the dequantized weights, and equal to the bit where they must be.

Products of codes with activations rounded to int8 have the bits of their definition, written out here one number at a time.
"""

from __future__ import annotations

import ctypes.util
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import (
    DTYPES,
    INFINITY,
    NAN,
    SHORT,
    Kernels,
    Planned,
    check_linear,
    experts_by_linears,
    quantized,
    random,
    row,
    same_bits,
    with_dtypes,
)
from torch import Tensor, nn

from optimum_neuron.kernels.run.short_scales import are_short
from optimum_neuron.kernels.steps.steps import Experts, Linears
from optimum_neuron.step.features.codes.modules import QuantizedLinear, multiplying, reference_product
from optimum_neuron.step.features.codes.weight import CODE_DTYPES, PACKED, QuantizedWeight
from optimum_neuron.targets.cpu.ops import OPS, expert_linear


pytestmark = pytest.mark.usefixtures("torch_with_one_thread")
# Kind, whether there is a shift, the type of scales, and what activations are rounded to.
FORMS = [
    ("int8", False, torch.bfloat16, None),
    ("int8", True, torch.float32, None),
    ("int4", False, torch.float16, None),
    ("int4", False, SHORT, None),
    ("int4", True, torch.float32, None),
    ("fp8", False, torch.float32, None),
    ("fp4", False, torch.bfloat16, None),
]
ROUNDED = [
    ("int8", False, torch.float32, "int8"),
    ("int8", True, torch.bfloat16, "int8"),
    ("int4", False, torch.float16, "int8"),
    ("int4", True, torch.float16, "int8"),
]
Form = tuple[str, bool, torch.dtype | str, str | None]
with_rounded_forms = pytest.mark.parametrize("form", ROUNDED, ids=str)
with_all_forms = pytest.mark.parametrize("form", [*FORMS, *ROUNDED], ids=str)


def of_form(form: Form, *shape: int, group: int) -> QuantizedWeight:
    kind, shifted, scale, activations = form
    return quantized(kind, *shape, group=group, shifted=shifted, scale=scale, activations=activations)


def check_rows(kernels: Kernels, x: Tensor, weight: QuantizedWeight, about: Any, bias: Tensor | None = None) -> Tensor:
    """What a layer makes of rows, which is what it makes of fewer by any number of threads."""
    whole = kernels.linear(x, weight, bias)
    for rows in (1, 2, 3, 5, 7, 16, 17, 40):
        with kernels.with_threads(1 + rows % 3):
            assert same_bits(kernels.linear(x[-rows:], weight, bias), whole[-rows:]), (about, rows)
    return whole


# Columns, the size of a group, and outputs: groups that are no multiple of a block or of a vector of any instruction set, groups longer
# than what is unpacked at once, and outputs that fill no tile and no panel.
SHAPES = [(2, 2, 1), (48, 48, 37), (96, 16, 5), (22, 22, 9), (256, 32, 70), (2080, 2080, 9), (4288, 2144, 3)]
SHAPES += [(1536, 128, 33), (960, 96, 37), (768, 256, 50), (1446, 482, 130)]


@with_dtypes
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_quantized_layers_are_near_float64(kernels: Kernels, dtype: torch.dtype, form: Form) -> None:
    for columns, group, outputs in SHAPES:
        weight = of_form(form, outputs, columns, group=group)
        x, bias = random(40, columns, dtype=dtype), random(outputs, dtype=dtype)
        check_linear(check_rows(kernels, x, weight, (columns, group, outputs), bias), x, weight, bias)


@with_dtypes
def test_of_float_codes_and_whole_scales_nothing_is_rounded(kernels: Kernels, dtype: torch.dtype) -> None:
    """Every code of every kind is what it stands for, in every place of a block."""
    for kind in CODE_DTYPES:
        codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(32).view(256, 32)
        columns = 64 if kind in PACKED else 32
        weight = QuantizedWeight(kind, codes.view(CODE_DTYPES[kind]), torch.full((256, columns // 32), 0.5))
        x = torch.eye(columns).to(dtype)
        result = kernels.linear(x, weight)
        # A product with the zeros beside it is NaN too, where a code is.
        wanted = torch.where(weight.dequantize().isnan().any(1), NAN, weight.dequantize().t())
        assert torch.equal(result.isnan(), wanted.isnan())
        assert torch.equal(result.nan_to_num(0).float(), wanted.nan_to_num(0)), kind


@with_dtypes
def test_few_and_many_rows_round_each_sum_alike(kernels: Kernels, dtype: torch.dtype) -> None:
    """Where the terms cancel, what is left is the rounding of sums, and no rounding of the result hides it."""
    for form, group in product(FORMS, (32, 48, 96, 240)):  # of a tile or several, whole and not
        half = of_form(form, 33, 480, group=group)
        shift = None if half.shift is None else torch.cat([half.shift, -half.shift], -1)
        codes = torch.cat([half.codes.view(torch.uint8)] * 2, -1).view(half.codes.dtype)
        weight = QuantizedWeight(form[0], codes, torch.cat([half.scale, -half.scale], -1), shift)
        x = random(40, 480, dtype=dtype).repeat(1, 2)
        assert check_rows(kernels, x, weight, (form, group)).any()


@with_dtypes
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_few_and_many_rows_round_sums_of_all_columns_alike(kernels: Kernels, dtype: torch.dtype, kind: str) -> None:
    """Terms cancel here as well, and in float32 and bfloat16 some of the sums are below the normal numbers."""
    smallest = torch.finfo(dtype).tiny
    for columns, outputs in product((1, 15, 16, 17, 32, 33, 50, 64, 96, 515), (1, 16, 33)):
        codes = quantized(kind, outputs, columns, group=columns).codes
        both = torch.cat([codes.view(torch.uint8), codes.view(torch.uint8)], -1).view(codes.dtype)
        x = random(20, columns, dtype=dtype)
        for size in (1.0, smallest):
            weight = QuantizedWeight(kind, both, torch.full((outputs, 1), min(1 / size, 2.0**120)))
            given = torch.cat([x * size, x.flip(1) * -size], -1)
            assert check_rows(kernels, given, weight, (columns, outputs, size)).any() or columns == 1


@examples(100)
@given(st.sampled_from([None, None, None, *FORMS, *ROUNDED]), st.sampled_from(DTYPES), st.data())
def test_no_size_place_or_thread_changes_a_row_of_a_linear_layer_plain_or_quantized(
    kernels: Kernels, form: Form | None, dtype: torch.dtype, data: st.DataObject
) -> None:
    group = data.draw(st.one_of(st.sampled_from([16, 32, 48, 64, 128, 640]), st.integers(1, 300)), "group")
    group *= 2 if form and form[0] in PACKED and group % 2 else 1
    columns = group * data.draw(st.integers(1, max(1, (1200 if form else 3000) // group)), "groups")
    outputs, rows = data.draw(st.integers(1, 150), "outputs"), data.draw(st.integers(1, 200), "rows")
    first = data.draw(st.integers(0, rows - 1), "first")
    stop = data.draw(st.integers(first + 1, rows), "stop")
    begin = data.draw(st.integers(0, outputs - 1), "begin")
    weight = of_form(form, outputs, columns, group=group) if form else random(outputs, columns, dtype=dtype)
    x, bias = random(rows, columns, dtype=dtype), random(outputs, dtype=dtype)
    whole = kernels.linear(x, weight, bias)
    if isinstance(weight, Tensor) or weight.activations is None:
        check_linear(whole, x, weight, bias)
    else:
        own, few = slice(first, first + 1), slice(begin, begin + 1)
        assert same_bits(whole[own, few], defined(x[own], row(weight, few), bias[few]))
    with kernels.with_threads(data.draw(st.integers(1, 3), "threads")):
        parts = [row(weight, slice(0, begin + 1)), row(weight, slice(begin, None))]
        two = kernels.linears(x[first:stop], parts, [None, bias[begin:]])
    assert same_bits(two[1], whole[first:stop, begin:])


@with_dtypes
def test_layers_beside_one_with_short_scales_are_what_they_are_alone(kernels: Kernels, dtype: torch.dtype) -> None:
    """Whether scales are short depends on a layer's own alone, and a chunk that does not end its prompt leaves some layers out."""
    weights = [
        quantized("int4", 24, 256, group=64, scale=torch.float16),
        quantized("int4", 40, 256, group=64, scale=SHORT),
        quantized("int4", 40, 256, group=64, shifted=True, scale=torch.float16),
    ]
    x = random(40, 256, dtype=dtype)
    for rows in (1, 2, 16, 40):
        together = kernels.linears(x[:rows], weights, [None] * 3)
        for result, weight in zip(together, weights, strict=True):
            assert same_bits(result, kernels.linear(x[:rows], weight)), rows


def test_scales_that_are_infinite_or_have_more_bits_are_not_short() -> None:
    assert are_short(np.array([0.0, -0.0, 31.0, -(2.0**-18), 63488.0, -1.9375], np.float16))
    for scale in (33.0, 2.0**-19, INFINITY, -INFINITY, NAN):
        assert not are_short(np.array([1.0, scale], np.float16)), scale
    assert not are_short(np.ones(1, np.float32)) and not are_short(np.ones(1, "bfloat16"))


@with_dtypes
@with_all_forms
def test_what_is_not_finite_is_where_the_reference_has_it(kernels: Kernels, dtype: torch.dtype, form: Form) -> None:
    for (group, columns), value in product(((16, 48), (64, 192)), (NAN, INFINITY, -INFINITY)):
        weight, x = of_form(form, 37, columns, group=group), random(19, columns, dtype=dtype)
        bad, scales, clean = x.clone(), weight.scale.clone(), kernels.linear(x, weight)
        bad[17, columns - 1], scales[1, -1] = value, value
        result, others = kernels.linear(bad, weight), torch.arange(19) != 17
        assert not result[17].isfinite().any() and same_bits(result[others], clean[others])
        result, others = kernels.linear(x, replace(weight, scale=scales)), torch.arange(37) != 1
        assert not result[:, 1].isfinite().any() and same_bits(result[:, others], clean[:, others])


@with_dtypes
@with_all_forms
def test_experts_compute_what_layers_do(kernels: Kernels, dtype: torch.dtype, form: Form) -> None:
    weight, bias = of_form(form, 4, 70, 96, group=48), random(4, 70, dtype=dtype)
    for tokens, threads in ((1, 1), (23, 3)):
        index = torch.randint(0, 6, (tokens, 2))
        for x in (random(tokens, 96, dtype=dtype), random(tokens, 2, 96, dtype=dtype)):
            with kernels.with_threads(threads):
                result = kernels.expert_linear(x, index, weight, bias)
            assert same_bits(result, experts_by_linears(kernels, x, index, weight, bias))


# Columns, the size of a group, and outputs: groups of one block, of several, and of blocks that are not whole.
ROUNDED_SHAPES = [
    (64, 32, 5),
    (576, 576, 19),
    (256, 128, 16),
    (192, 64, 33),
    (36, 12, 3),
    (330, 110, 9),
    (2080, 2080, 2),
]


_fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
_fmaf.restype, _fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3


def _fused(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a * b + c, rounded once."""
    return np.float32(_fmaf(a, b, c))


def _one(x: np.ndarray, weight: QuantizedWeight, output: int) -> np.float32:
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
@with_rounded_forms
def test_products_have_the_bits_of_their_definition(kernels: Kernels, dtype: torch.dtype, form: Form) -> None:
    for columns, group, outputs in ROUNDED_SHAPES:
        weight = of_form(form, outputs, columns, group=group)
        x, bias = _hard(random(6, columns, dtype=dtype)), random(outputs, dtype=dtype)
        result, few = kernels.linear(x, weight, bias), slice(0, 3)
        assert same_bits(result[:, few], defined(x, row(weight, few), bias[few])), (columns, group, outputs)
        near = 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(result, reference_product(x, weight, bias), rtol=near, atol=1e-30)


@with_rounded_forms
def test_rows_of_many_blocks_have_the_same_bits_however_many_there_are(kernels: Kernels, form: Form) -> None:
    """Blocks of several turns, and groups that end within one, for tiles of few rows and batches of many."""
    for columns, group in ((2080, 2080), (2080, 32), (1152, 64), (1300, 130)):
        weight, x = of_form(form, 35, columns, group=group), random(600, columns, dtype=torch.float32)
        whole, few = check_rows(kernels, x, weight, (columns, group)), slice(33, 34)
        assert same_bits(whole[597:598, few], defined(x[597:598], row(weight, few), None)), (columns, group)


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
            result = kernels.linear(x, weight)
            assert torch.equal(result, torch.full((rows, 20), -127.0 * weight.values()[0].sum().item())), (kind, code)


class _Layers(nn.Module):
    """Layers of one input: quantized alike or otherwise, with rounded activations, a plain one, and experts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        bias = nn.Parameter(random(24, dtype=dtype), requires_grad=False)
        self.first = QuantizedLinear(quantized("int4", 24, 64, group=32, shifted=True), bias)
        self.layers = nn.ModuleList(
            [
                QuantizedLinear(quantized("int4", 40, 64, group=32)),
                QuantizedLinear(quantized("fp8", 40, 64, group=64)),
                nn.Linear(64, 40, bias=False).to(dtype).requires_grad_(False),
                QuantizedLinear(quantized("int4", 40, 64, group=32, activations="int8")),
                QuantizedLinear(quantized("int4", 40, 64, group=32, shifted=True, activations="int8")),
            ]
        )
        experts = quantized("int4", 3, 24, 64, group=32)
        self.codes, self.scale = nn.Buffer(experts.codes), nn.Buffer(experts.scale)

    @property
    def experts(self) -> QuantizedWeight:
        return QuantizedWeight("int4", self.codes, self.scale)

    def multiply(self, own: Tensor) -> list[Tensor]:
        return [self.first(own), *(layer(own) for layer in self.layers)]

    def forward(self, x: Tensor, index: Tensor) -> list[Tensor]:
        own = x * 2
        return [*self.multiply(own), expert_linear(own[0], index, self.experts, None)]


@with_dtypes
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_layers_of_a_graph_that_share_their_input_are_one_step_where_they_are_quantized_alike(
    best_kernels: Kernels, dtype: torch.dtype, rows: int
) -> None:
    module, inputs = (
        _Layers(dtype),
        (random(1, rows, 64, dtype=dtype), torch.randint(0, 4, (rows, 2), dtype=torch.int32)),
    )
    with multiplying(OPS.quantized_linear):
        planned = Planned(best_kernels, module, inputs)
    steps = [step for step in planned.plan.steps if isinstance(step, Linears)]
    kinds = [[layer.codes and (layer.codes.kind, layer.codes.activations) for layer in step.layers] for step in steps]
    assert sorted(kinds, key=str) == [[("fp8", None)], [("int4", "int8")] * 2, [("int4", None)] * 2, [None]]
    assert [type(step) for step in planned.plan.steps].count(Experts) == 1
    own, index = inputs[0] * 2, inputs[1]
    expected = [*module.multiply(own), best_kernels.expert_linear(own[0], index, module.experts)]
    for result, wanted in zip(planned(*inputs), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-2)


def test_groups_and_types_that_no_kernel_takes_are_refused_with_the_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"of fp4 has 3 inputs to a scale, and target='cpu' takes two .* target='eager'"
    ):
        OPS.quantized_linear(torch.randn(1, 48), quantized("fp4", 8, 48, group=3), None)
    with pytest.raises(ValueError, match=r"meets torch.float64, and target='cpu' multiplies torch.float32, "):
        OPS.quantized_linear(torch.randn(1, 48).double(), quantized("int8", 8, 48, group=16), None)
    with pytest.raises(ValueError, match="activations of int8 do not meet codes of fp8: those of int8 meet int8 and"):
        quantized("fp8", 8, 64, group=64, activations="int8")
