# SPDX-License-Identifier: Apache-2.0
"""Linear layers and experts of every instruction set: near float64, and a row's bits its own."""

from __future__ import annotations

import pytest
import torch
from coded_weights import experts_by_linears
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import (
    DTYPES,
    Kernels,
    RefusedError,
    Tensors,
    all_same,
    check_guards,
    check_linear,
    guarded,
    random,
    same_bits,
    with_dtypes,
)
from torch import Tensor

from optimum_neuron.kernels.steps.access import PlanError
from optimum_neuron.kernels.steps.steps import Layer, Linears


pytestmark = pytest.mark.usefixtures("torch_with_one_thread")
NAN, INFINITY = float("nan"), float("inf")
# No multiples of a vector, of a chunk of columns, of a panel or of a tile; one layer and several.
LINEARS = [
    (1, [1]),
    (31, [5, 3]),
    (33, [4, 3]),
    (100, [37]),
    (576, [192, 64, 64]),
    (2050, [130, 7]),
    (1000, [1501, 3]),
]
# Of one tile, of one block and of several, each with tiles of even and uneven heights.
ROWS = (1, 2, 3, 5, 6, 7, 13, 24, 25, 32, 72, 145)


@pytest.fixture
def kernels(product_kernels: Kernels) -> Kernels:
    return product_kernels


@with_dtypes
@pytest.mark.parametrize(("columns", "outputs"), LINEARS)
def test_linears_match_float64_and_a_row_depends_on_nothing_else(
    kernels: Kernels, dtype: torch.dtype, columns: int, outputs: list[int]
) -> None:
    weights = [random(size, columns, dtype=dtype) for size in outputs]
    biases = [random(size, dtype=dtype) if index % 2 == 0 else None for index, size in enumerate(outputs)]
    x = random(300, columns, dtype=dtype)
    whole = kernels.linears(x, weights, biases)
    for result, weight, bias in zip(whole, weights, biases, strict=True):
        check_linear(result, x, weight, bias)
        assert same_bits(kernels.linear(x, weight, bias), result)
    for rows in range(1, 300) if columns == 33 else ROWS:
        assert all_same(kernels.linears(x[:rows], weights, biases), [result[:rows] for result in whole])
    for count in (1, 3):
        with kernels.with_threads(count):
            assert all_same(kernels.linears(x[:70], weights, biases), [result[:70] for result in whole])
    order = torch.randperm(300)
    assert all_same(kernels.linears(x[order], weights, biases), [result[order] for result in whole])
    for value in (NAN, INFINITY):
        poisoned, bad = x.clone(), weights[0].clone()
        poisoned[3, -1], bad[0, -1] = value, value
        for result, clean in zip(kernels.linears(poisoned, weights, biases), whole, strict=True):
            assert not result[3].isfinite().any()
            assert same_bits(result[4:], clean[4:]) and same_bits(result[:3], clean[:3])
        result = kernels.linear(x, bad, biases[0])
        assert not result[:, 0].isfinite().any() and same_bits(result[:, 1:], whole[0][:, 1:])


@examples(60)
@given(st.sampled_from(DTYPES), st.data())
def test_neither_sizes_nor_threads_change_a_row_of_linears(
    product_kernels: Kernels, dtype: torch.dtype, data: st.DataObject
) -> None:
    columns = data.draw(st.one_of(st.integers(1, 200), st.integers(1, 3000)), "columns")
    outputs = data.draw(st.integers(1, 150), "outputs")
    rows = data.draw(st.integers(1, 300), "rows")
    first = data.draw(st.integers(0, rows - 1), "first")
    stop = data.draw(st.integers(first + 1, rows), "stop")
    begin = data.draw(st.integers(0, outputs - 1), "begin")
    x, weight, bias = (random(*sizes, dtype=dtype) for sizes in ((rows, columns), (outputs, columns), (outputs,)))
    whole = product_kernels.linear(x, weight, bias)
    with product_kernels.with_threads(data.draw(st.integers(1, 3), "threads")):
        part = product_kernels.linear(x[first:stop], weight[begin:], bias[begin:])
    assert same_bits(part, whole[first:stop, begin:])


@pytest.mark.parametrize("beside", [1.0, 0.0])
def test_every_number_of_float16_is_what_it_is(kernels: Kernels, beside: float) -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    for place in range(4):
        x, weight = torch.zeros(1, 32).half(), torch.full((len(numbers), 32), beside).half()
        x[0, place], weight[:, place] = 1, numbers
        torch.testing.assert_close(kernels.linear(x, weight)[0], numbers, rtol=0, atol=0, equal_nan=True)


@with_dtypes
def test_rows_of_linears_may_lie_apart_before_and_after(kernels: Kernels, dtype: torch.dtype) -> None:
    wide, weight = random(9, 200, dtype=dtype), random(40, 64, dtype=dtype)
    expected = kernels.linear(wide[:, 70:134].contiguous(), weight)
    assert same_bits(kernels.linear(wide[:, 70:134], weight), expected)
    assert same_bits(kernels.linear(wide[::2, 70:134], weight), expected[::2])
    assert same_bits(kernels.linear(wide[2, 70:134].expand(5, 64), weight), expected[2].expand(5, 40))
    both = guarded((9, 100), dtype)
    both.fill_(7)
    tensors = Tensors()
    layers = (Layer(tensors(weight), None, tensors(both[:, 10:50])),)
    kernels.run(Linears(tensors(wide[:, 70:134]), layers), tensors)
    check_guards(both)
    assert same_bits(both[:, 10:50], expected)
    assert (both[:, :10] == 7).all() and (both[:, 50:] == 7).all()


def test_linears_of_another_form_are_refused(best_kernels: Kernels) -> None:
    x, weight, bias = (random(*sizes, dtype=torch.float32) for sizes in ((3, 64), (40, 64), (40,)))
    turned = [each.T.contiguous().T for each in (x, weight)]
    refused: list[tuple[Tensor, ...]] = [
        (x[:0], weight),
        (x[0], weight),
        (x.double(), weight.double()),
        (turned[0], weight),
    ]
    refused += [(x, each) for each in (weight.bfloat16(), turned[1], weight[:, :60])]
    refused += [(x, weight, each) for each in (bias[:39], bias.half())]
    for each in refused:
        with pytest.raises(PlanError):
            best_kernels.linear(*each)


# Experts, outputs and columns: no multiples of a vector, a tile or a panel, and more columns than a chunk has.
EXPERTS = [(1, 1, 1), (4, 33, 31), (3, 130, 100), (7, 64, 64), (2, 5, 2050)]
# Tokens and experts of each.
ROUTES = [(1, 1), (1, 4), (5, 2), (13, 3), (72, 2)]


@with_dtypes
@pytest.mark.parametrize(("experts", "outputs", "columns"), EXPERTS)
def test_rows_of_experts_are_those_of_linear_layers(
    kernels: Kernels, dtype: torch.dtype, experts: int, outputs: int, columns: int
) -> None:
    weight, bias = random(experts, outputs, columns, dtype=dtype), random(experts, outputs, dtype=dtype)
    routes = [torch.randint(0, experts + 2, route) for route in ROUTES]
    routes += [torch.full((50, 2), expert) for expert in (0, experts - 1, experts, 2**62)]  # all tokens or none
    for index in routes:
        for x in (random(len(index), columns, dtype=dtype), random(*index.shape, columns, dtype=dtype)):
            for own_bias in (bias, None):
                result = kernels.expert_linear(x, index, weight, own_bias)
                assert same_bits(result, experts_by_linears(kernels, x, index, weight, own_bias))


@with_dtypes
def test_experts_that_no_token_goes_to_are_not_read(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight, bias = (random(*sizes, dtype=dtype) for sizes in ((9, 64), (5, 24, 64), (5, 24)))
    index = torch.tensor([[0, 3], [3, 5]] * 4 + [[5, 5]])
    clean = kernels.expert_linear(x, index, weight, bias)
    weight[[1, 2, 4]], bias[[1, 2, 4]] = NAN, NAN
    x[8] = NAN  # goes nowhere
    assert same_bits(kernels.expert_linear(x, index, weight, bias), clean)
    assert not clean[8].any() and not clean[1, 1].any()


@with_dtypes
def test_the_number_of_threads_changes_no_bit_of_experts(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight = random(60, 256, dtype=dtype), random(16, 512, 256, dtype=dtype)
    index = torch.randint(0, 17, (60, 4))
    index[:, 0] = 3  # one expert with more work than all others
    results = []
    for count in (1, 2, 3, 5):
        with kernels.with_threads(count):
            results.append(kernels.expert_linear(x, index, weight))
    assert all_same(results[1:], results[:1] * 3)


def test_a_negative_expert_is_refused_and_nothing_is_computed(kernels: Kernels) -> None:
    x, weight = random(6, 64, dtype=torch.float32), random(4, 10, 64, dtype=torch.float32)
    for wrong in (-1, -(2**62)):
        index, output = torch.randint(0, 4, (6, 2)), torch.full((6, 2, 10), 7.0)
        index[5, 1] = wrong
        with pytest.raises(RefusedError):
            kernels.expert_linear(x, index, weight, output=output)
        assert (output == 7).all()


def test_experts_of_another_form_are_refused(best_kernels: Kernels) -> None:
    x, weight, bias = (random(*sizes, dtype=torch.float32) for sizes in ((6, 64), (4, 10, 64), (4, 10)))
    index = torch.randint(0, 4, (6, 2))
    turned = weight.transpose(0, 1).contiguous().transpose(0, 1)
    indices = (index[:, :0], index[:5], index.int(), index.T.contiguous().T, index[0])
    refused: list[tuple[Tensor, ...]] = [(x[:0], index[:0], weight), (x.double(), index, weight.double())]
    refused += [(each, index, weight) for each in (random(6, 3, 64, dtype=torch.float32), x.T.contiguous().T)]
    refused += [(x, each, weight) for each in indices]
    refused += [(x, index, each) for each in (weight[:, :, :60], weight[0], weight.bfloat16(), turned)]
    refused += [(x, index, weight, each) for each in (bias[:3], bias.bfloat16())]
    for each in refused:
        with pytest.raises(PlanError):
            best_kernels.expert_linear(*each)
