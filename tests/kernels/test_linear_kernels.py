# SPDX-License-Identifier: Apache-2.0
"""Linear layers and experts of every instruction set: near float64, and a row's bits its own."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import (
    INFINITY,
    NAN,
    Kernels,
    RefusedError,
    Tensors,
    all_same,
    check_guards,
    check_linear,
    experts_by_linears,
    guarded,
    random,
    same_bits,
    with_dtypes,
)

from optimum_neuron.kernels.steps.operands import Layer
from optimum_neuron.kernels.steps.steps import Linears


pytestmark = pytest.mark.usefixtures("torch_with_one_thread")
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


# Experts, outputs and columns: no multiples of a vector, a tile or a panel, and more columns than a chunk has.
EXPERTS = [(1, 1, 1), (16, 512, 256), (4, 33, 31), (3, 130, 100), (7, 64, 64), (2, 5, 2050)]
# Tokens and experts of each.
ROUTES = [(1, 1), (1, 4), (5, 2), (13, 3), (72, 2)]


@with_dtypes
@pytest.mark.parametrize(("experts", "outputs", "columns"), EXPERTS)
def test_rows_of_experts_are_those_of_linear_layers_with_any_number_of_threads(
    kernels: Kernels, dtype: torch.dtype, experts: int, outputs: int, columns: int
) -> None:
    weight, bias = random(experts, outputs, columns, dtype=dtype), random(experts, outputs, dtype=dtype)
    routes = [torch.randint(0, experts + 2, route) for route in ROUTES]
    routes += [torch.full((50, 2), expert) for expert in (0, experts - 1, experts, 2**31 - 1)]  # all tokens or none
    for index in routes:
        for x in (random(len(index), columns, dtype=dtype), random(*index.shape, columns, dtype=dtype)):
            for own_bias in (bias, None):
                expected = experts_by_linears(kernels, x, index, weight, own_bias)
                for count in (1, 3):
                    with kernels.with_threads(count):
                        assert same_bits(kernels.expert_linear(x, index, weight, own_bias), expected)


@with_dtypes
def test_experts_that_no_token_goes_to_are_not_read(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight, bias = (random(*sizes, dtype=dtype) for sizes in ((9, 64), (5, 24, 64), (5, 24)))
    index = torch.tensor([[0, 3], [3, 5]] * 4 + [[5, 5]])
    clean = kernels.expert_linear(x, index, weight, bias)
    weight[[1, 2, 4]], bias[[1, 2, 4]] = NAN, NAN
    x[8] = NAN  # goes nowhere
    assert same_bits(kernels.expert_linear(x, index, weight, bias), clean)
    assert not clean[8].any() and not clean[1, 1].any()


def test_a_negative_expert_is_refused_and_nothing_is_computed(kernels: Kernels) -> None:
    x, weight = random(6, 64, dtype=torch.float32), random(4, 10, 64, dtype=torch.float32)
    for wrong in (-1, -(2**31)):
        index, output = torch.randint(0, 4, (6, 2), dtype=torch.int32), torch.full((6, 2, 10), 7.0)
        index[5, 1] = wrong
        with pytest.raises(RefusedError):
            kernels.expert_linear(x, index, weight, output=output)
        assert (output == 7).all()
