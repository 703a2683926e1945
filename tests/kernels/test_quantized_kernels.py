# SPDX-License-Identifier: Apache-2.0
"""The kernels of quantized weights: near float64 with the dequantized weights, and equal to the bit where they must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from coded_weights import SHORT, quantized, row
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import DTYPES, ROUNDING, Kernels, Planned, Tensors, guarded, random, same_bits, with_dtypes
from torch import Tensor, nn
from torch.nn.functional import linear

from optimum_neuron.kernels.run.short_scales import are_short
from optimum_neuron.kernels.steps.access import PlanError
from optimum_neuron.kernels.steps.steps import Codes, Experts, Layer, Linears
from optimum_neuron.step.features.codes.modules import QuantizedLinear, multiplying
from optimum_neuron.step.features.codes.weight import CODE_DTYPES, PACKED, QuantizedWeight
from optimum_neuron.targets.cpu.ops import OPS, expert_linear


pytestmark = pytest.mark.usefixtures("torch_with_one_thread")
KINDS = tuple(CODE_DTYPES)
# Kind, whether there is a shift, and the type of scales.
FORMS = [
    ("int8", False, torch.bfloat16),
    ("int8", True, torch.float32),
    ("int4", False, torch.float16),
    ("int4", False, SHORT),
    ("int4", True, torch.float32),
    ("fp8", False, torch.float32),
    ("fp4", False, torch.bfloat16),
]
NAN, INFINITY = float("nan"), float("inf")

# The same with activations of int8.
ROUNDED = [
    ("int8", False, torch.float32, "int8"),
    ("int8", True, torch.bfloat16, "int8"),
    ("int4", False, torch.float16, "int8"),
    ("int4", True, torch.float16, "int8"),
]
Form = tuple[Any, ...]
with_forms = pytest.mark.parametrize("form", FORMS, ids=str)
with_all_forms = pytest.mark.parametrize("form", [*FORMS, *ROUNDED], ids=str)


def of_form(form: Form, *shape: int, group: int) -> QuantizedWeight:
    return quantized(
        form[0], *shape, group=group, **dict(zip(("shifted", "scale", "activations"), form[1:], strict=False))
    )


@pytest.fixture
def kernels(product_kernels: Kernels) -> Kernels:
    return product_kernels


def check_near(result: Tensor, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
    """Within the rounding of sums in float32 of codes, of their scales and of shifts, and one of the result."""
    exact = linear(x.double(), weight.dequantize().double(), None if bias is None else bias.double())
    scaled = (
        weight.dequantize()
        if weight.shift is None
        else replace(weight, shift=torch.zeros_like(weight.scale.float())).dequantize()
    )
    size = scaled.double().abs()
    if weight.shift is not None:
        size = size + weight.shift.double().abs().repeat_interleave(weight.group_size, -1)
    terms = linear(x.double().abs(), size) + 1
    error = (result.double() - exact).abs()
    assert (error <= terms * 2**-20 + exact.abs() * ROUNDING[x.dtype] * 1.001).all()


# Columns, the size of a group, and outputs: groups that are no multiple of a block or of a vector of any instruction set, groups longer
# than what is unpacked at once, and outputs that fill no tile and no panel.
SHAPES = [
    (2, 2, 1),
    (48, 48, 37),
    (96, 16, 5),
    (22, 22, 9),
    (256, 32, 70),
    (2080, 2080, 9),
    (4288, 2144, 3),
    (1536, 128, 33),
    (960, 96, 37),
    (768, 256, 50),
    (1446, 482, 130),
]
ROWS = (1, 2, 7, 16, 17, 40)


@with_dtypes
@with_forms
def test_quantized_layers_are_near_float64(kernels: Kernels, dtype: torch.dtype, form: Form) -> None:
    for columns, group, outputs in SHAPES:
        weight = of_form(form, outputs, columns, group=group)
        x, bias = random(max(ROWS), columns, dtype=dtype), random(outputs, dtype=dtype)
        (whole,) = kernels.quantized_linears(x, [weight], [bias])
        assert whole.dtype == dtype
        check_near(whole, x, weight, bias)
        for rows in ROWS[:-1]:
            (fewer,) = kernels.quantized_linears(x[:rows], [weight], [bias])
            assert same_bits(fewer, whole[:rows]), (columns, group, outputs, rows)


@with_dtypes
def test_of_float_codes_and_whole_scales_nothing_is_rounded(kernels: Kernels, dtype: torch.dtype) -> None:
    """Every code of every kind is what it stands for, in every place of a block."""
    for kind in KINDS:
        codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(32).view(256, 32)
        columns = 64 if kind in PACKED else 32
        weight = QuantizedWeight(kind, codes.view(CODE_DTYPES[kind]), torch.full((256, columns // 32), 0.5))
        x = torch.eye(columns).to(dtype)
        (result,) = kernels.quantized_linears(x, [weight], [None])
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
        (whole,) = kernels.quantized_linears(x, [weight], [None])
        assert whole.any()
        for rows in (1, 2, 3, 16, 17):
            fewer = kernels.quantized_linears(x[:rows], [weight], [None])[0]
            assert same_bits(fewer, whole[:rows]), (form, group, rows)


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
            (whole,) = kernels.quantized_linears(given, [weight], [None])
            assert whole.any() or columns == 1
            for rows in (1, 2, 3, 16, 17):
                (fewer,) = kernels.quantized_linears(given[:rows], [weight], [None])
                assert same_bits(fewer, whole[:rows]), (columns, outputs, size, rows)


@examples(100)
@given(st.sampled_from(FORMS), st.sampled_from(DTYPES), st.data())
def test_no_size_place_or_thread_changes_a_row(
    best_kernels: Kernels, form: Form, dtype: torch.dtype, data: st.DataObject
) -> None:
    kind = form[0]
    group = data.draw(st.one_of(st.sampled_from([16, 32, 48, 64, 128, 640]), st.integers(1, 300)), "group")
    group *= 2 if kind in PACKED and group % 2 else 1
    columns = group * data.draw(st.integers(1, max(1, 1200 // group)), "groups")
    outputs, rows = data.draw(st.integers(1, 150), "outputs"), data.draw(st.integers(1, 200), "rows")
    first = data.draw(st.integers(0, rows - 1), "first")
    stop = data.draw(st.integers(first + 1, rows), "stop")
    begin = data.draw(st.integers(0, outputs - 1), "begin")
    weight = of_form(form, outputs, columns, group=group)
    x, bias = random(rows, columns, dtype=dtype), random(outputs, dtype=dtype)
    (whole,) = best_kernels.quantized_linears(x, [weight], [bias])
    check_near(whole, x, weight, bias)
    with best_kernels.with_threads(data.draw(st.integers(1, 3), "threads")):
        two = best_kernels.quantized_linears(
            x[first:stop], [row(weight, slice(0, begin + 1)), row(weight, slice(begin, None))], [None, bias[begin:]]
        )
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
        together = kernels.quantized_linears(x[:rows], weights, [None] * 3)
        for result, weight in zip(together, weights, strict=True):
            assert same_bits(result, kernels.quantized_linears(x[:rows], [weight], [None])[0]), rows


def test_scales_that_are_infinite_or_have_more_bits_are_not_short() -> None:
    assert are_short(np.array([0.0, -0.0, 31.0, -(2.0**-18), 63488.0, -1.9375], np.float16))
    for scale in (33.0, 2.0**-19, INFINITY, -INFINITY, NAN):
        assert not are_short(np.array([1.0, scale], np.float16)), scale
    assert not are_short(np.ones(1, np.float32)) and not are_short(np.ones(1, "bfloat16"))


@with_dtypes
@with_all_forms
def test_the_number_of_threads_changes_no_bit(kernels: Kernels, dtype: torch.dtype, form: Form) -> None:
    weight = of_form(form, 1500, 512, group=64)
    x = random(70, 512, dtype=dtype)
    for rows in (1, 70):
        results = []
        for count in (1, 3):
            with kernels.with_threads(count):
                results.append(kernels.quantized_linears(x[:rows], [weight], [None])[0])
        assert same_bits(*results)


@with_dtypes
@with_all_forms
def test_what_is_not_finite_is_where_the_reference_has_it(kernels: Kernels, dtype: torch.dtype, form: Form) -> None:
    for group, columns in ((16, 48), (64, 192)):
        weight = of_form(form, 37, columns, group=group)
        x = random(19, columns, dtype=dtype)
        (clean,) = kernels.quantized_linears(x, [weight], [None])
        for value in (NAN, INFINITY, -INFINITY):
            bad = x.clone()
            bad[17, columns - 1] = value
            (result,) = kernels.quantized_linears(bad, [weight], [None])
            assert not result[17].isfinite().any()
            others = torch.arange(19) != 17
            assert same_bits(result[others], clean[others])
            scales = weight.scale.clone()
            scales[1, -1] = value
            (result,) = kernels.quantized_linears(x, [replace(weight, scale=scales)], [None])
            assert not result[:, 1].isfinite().any()
            others = torch.arange(37) != 1
            assert same_bits(result[:, others], clean[:, others])


@with_dtypes
@with_all_forms
def test_experts_compute_what_layers_do(kernels: Kernels, dtype: torch.dtype, form: Form) -> None:
    weight = of_form(form, 4, 70, 96, group=48)
    bias = random(4, 70, dtype=dtype)
    for tokens in (1, 23):
        index = torch.randint(0, 6, (tokens, 2))
        for x in (random(tokens, 96, dtype=dtype), random(tokens, 2, 96, dtype=dtype)):
            result = kernels.quantized_expert_linear(x, index, weight, bias)
            for expert in range(6):
                rows = x[:, None].expand(tokens, 2, 96) if x.dim() == 2 else x
                chosen = rows[index == expert].contiguous()
                if expert > 3:
                    assert not result[index == expert].any()
                elif len(chosen):
                    (wanted,) = kernels.quantized_linears(chosen, [row(weight, expert)], [bias[expert]])
                    assert same_bits(result[index == expert], wanted)


class _Layers(nn.Module):
    """Two layers of one input, a third of another kind and a plain one; rows of one part of it are read."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        bias = nn.Parameter(random(24, dtype=dtype), requires_grad=False)
        self.first = QuantizedLinear(quantized("int4", 24, 64, group=32, shifted=True), bias)
        self.second = QuantizedLinear(quantized("int4", 40, 64, group=32))
        self.third = QuantizedLinear(quantized("fp8", 40, 64, group=64))
        self.plain = nn.Linear(64, 40, bias=False).to(dtype).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        own = x * 2
        return self.first(own), self.second(own) + self.third(own) * self.plain(own)


@with_dtypes
def test_layers_of_a_graph_that_share_their_input_are_one_step(best_kernels: Kernels, dtype: torch.dtype) -> None:
    module, x = _Layers(dtype), random(1, 5, 64, dtype=dtype)
    with multiplying(OPS.quantized_linear):
        planned = Planned(best_kernels, module, [x])
    steps = [step for step in planned.plan.steps if isinstance(step, Linears)]
    kinds = [[layer.codes and layer.codes.kind for layer in step.layers] for step in steps]
    assert sorted(kinds, key=str) == [["fp8"], ["int4", "int4"], [None]]
    assert not planned.calls_torch
    for result, wanted in zip(planned(x), module(x), strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-2)


@with_dtypes
def test_experts_of_a_graph_are_one_step_each(best_kernels: Kernels, dtype: torch.dtype) -> None:
    weight, x = quantized("int4", 3, 24, 64, group=32), random(5, 64, dtype=dtype)
    index = torch.randint(0, 4, (5, 2))

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes, self.scale = nn.Buffer(weight.codes), nn.Buffer(weight.scale)

        def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor]:
            own = QuantizedWeight("int4", self.codes, self.scale)
            return (expert_linear(x, index, own, None),)

    planned = Planned(best_kernels, Routed(), [x, index], tokens=5)
    assert [type(step) for step in planned.plan.steps if isinstance(step, Experts)] == [Experts]
    (result,) = planned(x, index)
    wanted = best_kernels.quantized_expert_linear(x, index, weight, None)
    assert same_bits(result, wanted)
    (fewer,) = planned(x, index, live=2)
    assert same_bits(fewer[:2], wanted[:2])


def test_groups_and_types_that_no_kernel_takes_are_refused_with_the_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"of fp4 has 3 inputs to a scale, and target='cpu' takes two .* target='eager'"
    ):
        OPS.quantized_linear(torch.randn(1, 48), quantized("fp4", 8, 48, group=3), None)
    with pytest.raises(ValueError, match=r"meets torch.float64, and target='cpu' multiplies torch.float32, "):
        OPS.quantized_linear(torch.randn(1, 48).double(), quantized("int8", 8, 48, group=16), None)


def test_quantized_layers_of_another_form_are_refused(best_kernels: Kernels) -> None:
    weight, x = quantized("int4", 40, 64, group=32, shifted=True), random(3, 64, dtype=torch.float32)

    def change(**changes: Callable[[Tensors, Codes], Any]) -> tuple[Linears, Tensors]:
        tensors = Tensors()
        codes, output = tensors(weight.codes), tensors(guarded((3, 40), torch.float32))
        own = replace(
            tensors.codes(weight),
            **{name: each(tensors, tensors.codes(weight)) for name, each in changes.items() if name != "weight"},
        )
        codes = changes["weight"](tensors, own) if "weight" in changes else codes
        return Linears(tensors(x), (Layer(codes, None, output, own),)), tensors

    best_kernels.run(*change())
    refused: list[dict[str, Callable[[Tensors, Codes], Any]]] = [
        {"kind": lambda tensors, codes: "int2"},
        {"kind": lambda tensors, codes: "int8"},
        {"kind": lambda tensors, codes: "fp4"},  # has no shift
        {"scale": lambda tensors, codes: tensors(weight.scale[:, :1].contiguous())},
        {"scale": lambda tensors, codes: tensors(weight.scale.double())},
        {"scale": lambda tensors, codes: tensors(weight.scale[:39])},
        {"scale": lambda tensors, codes: tensors(weight.scale.repeat(1, 32))},
        {"scale": lambda tensors, codes: tensors(weight.scale[:, :0].contiguous())},
        {"scale": lambda tensors, codes: tensors(weight.scale[0])},
        {"scale": lambda tensors, codes: replace(codes.scale, offset=1)},
        {"shift": lambda tensors, codes: tensors(weight.shift.half())},  # type: ignore[union-attr]
        {"shift": lambda tensors, codes: tensors(weight.shift.T.contiguous().T)},  # type: ignore[union-attr]
        {"weight": lambda tensors, codes: tensors(weight.codes.view(torch.int8))},
        {"weight": lambda tensors, codes: tensors(weight.codes[:, :31].contiguous())},
        {"weight": lambda tensors, codes: tensors(weight.codes.T.contiguous().T)},
        {"weight": lambda tensors, codes: replace(tensors(weight.codes), offset=1)},
    ]
    for changes in refused:
        with pytest.raises(PlanError):
            best_kernels.run(*change(**changes))
    tensors = Tensors()
    layers = [
        Layer(tensors(each.codes), None, tensors(guarded((3, 40), torch.float32)), tensors.codes(each))
        for each in (weight, quantized("int4", 40, 64, group=16, shifted=True))
    ]
    with pytest.raises(PlanError, match="quantized in several ways"):
        best_kernels.run(Linears(tensors(x), tuple(layers)), tensors)
