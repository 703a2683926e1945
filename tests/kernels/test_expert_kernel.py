# SPDX-License-Identifier: Apache-2.0
"""The kernel of experts: each row as `linears` computes it alone, whoever else is routed where."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import Kernels, RefusedError, Tensors, guarded, random, same_bits, with_dtypes
from torch import Tensor

from optimum_neuron.kernels.steps.access import PlanError
from optimum_neuron.kernels.steps.steps import Experts


pytestmark = pytest.mark.usefixtures("torch_with_one_thread")
NAN = float("nan")


@pytest.fixture
def kernels(product_kernels: Kernels) -> Kernels:
    return product_kernels


def row_by_row(kernels: Kernels, x: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the dense kernel makes of each row alone, and zero where an index is none of an expert."""
    output = torch.zeros((*index.shape, weight.shape[1]), dtype=x.dtype)
    for token, places in enumerate(index.tolist()):
        for place, expert in enumerate(places):
            if expert < len(weight):
                row = x[token] if x.dim() == 2 else x[token, place]
                own = None if bias is None else bias[expert]
                output[token, place] = kernels.linears(row[None], [weight[expert]], [own])[0][0]
    return output


# Experts, outputs and columns: no multiples of a vector, a tile or a panel, and more columns than a chunk has.
SHAPES = [(1, 1, 1), (4, 33, 31), (3, 130, 100), (7, 64, 64), (2, 5, 2050)]
# Tokens and experts of each.
ROUTES = [(1, 1), (1, 4), (5, 2), (13, 3), (72, 2)]


@with_dtypes
@pytest.mark.parametrize(("experts", "outputs", "columns"), SHAPES)
def test_rows_are_those_of_the_dense_kernel(
    kernels: Kernels, dtype: torch.dtype, experts: int, outputs: int, columns: int
) -> None:
    weight, bias = random(experts, outputs, columns, dtype=dtype), random(experts, outputs, dtype=dtype)
    for tokens, k in ROUTES:
        index = torch.randint(0, experts + 2, (tokens, k))
        for x in (random(tokens, columns, dtype=dtype), random(tokens, k, columns, dtype=dtype)):
            for own_bias in (bias, None):
                result = kernels.expert_linear(x, index, weight, own_bias)
                assert result.dtype == dtype
                assert same_bits(result, row_by_row(kernels, x, index, weight, own_bias))


@with_dtypes
def test_one_expert_may_get_all_tokens_or_none(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight, bias = (random(*sizes, dtype=dtype) for sizes in ((50, 96), (4, 70, 96), (4, 70)))
    for expert in (*range(6), 2**62):
        index = torch.full((50, 2), expert)
        result = kernels.expert_linear(x, index, weight, bias)
        if expert < 4:
            expected = kernels.linears(x, [weight[expert]], [bias[expert]])[0]
            assert same_bits(result[:, 0], expected) and same_bits(result[:, 1], expected)
        else:
            assert not result.any()


@with_dtypes
def test_experts_that_nobody_is_routed_to_are_not_read(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight, bias = (random(*sizes, dtype=dtype) for sizes in ((9, 64), (5, 24, 64), (5, 24)))
    index = torch.tensor([[0, 3], [3, 5]] * 4 + [[5, 5]])
    clean = kernels.expert_linear(x, index, weight, bias)
    weight[[1, 2, 4]], bias[[1, 2, 4]] = NAN, NAN
    x[8] = NAN  # routed nowhere
    assert same_bits(kernels.expert_linear(x, index, weight, bias), clean)
    assert not clean[8].any() and not clean[1, 1].any()


@with_dtypes
def test_the_number_of_threads_changes_no_bit(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight = random(60, 256, dtype=dtype), random(16, 512, 256, dtype=dtype)
    index = torch.randint(0, 17, (60, 4))
    index[:, 0] = 3  # one expert with more work than all others
    results = []
    for count in (1, 2, 3, 5):
        with kernels.with_threads(count):
            results.append(kernels.expert_linear(x, index, weight, None))
    assert all(same_bits(result, results[0]) for result in results[1:])
    assert same_bits(results[0][:3], row_by_row(kernels, x[:3], index[:3], weight, None))


def test_a_negative_index_is_refused_and_nothing_is_computed(kernels: Kernels) -> None:
    x, weight = random(6, 64, dtype=torch.float32), random(4, 10, 64, dtype=torch.float32)
    for wrong in (-1, -(2**62)):
        index = torch.randint(0, 4, (6, 2))
        index[5, 1] = wrong
        output, tensors = guarded((6, 2, 10), torch.float32), Tensors()
        output.fill_(7)
        step = Experts(tensors(x), tensors(index), tensors(weight), None, tensors(output))
        with pytest.raises(RefusedError):
            kernels.run(step, tensors)
        assert (output == 7).all()


def test_experts_of_another_form_are_refused(best_kernels: Kernels) -> None:
    x, weight, bias = (random(*sizes, dtype=torch.float32) for sizes in ((6, 64), (4, 10, 64), (4, 10)))
    index = torch.randint(0, 4, (6, 2))
    refused: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = [
        (x[:0], index[:0], weight, None),
        (x, index[:, :0], weight, None),
        (x.double(), index, weight.double(), None),
        (x, index[:5], weight, None),
        (random(6, 3, 64, dtype=torch.float32), index, weight, None),
        (x.T.contiguous().T, index, weight, None),
        (x, index.int(), weight, None),
        (x, index.T.contiguous().T, weight, None),
        (x, index[0], weight, None),
        (x, index, weight[:, :, :60], None),
        (x, index, weight[0], None),
        (x, index, weight.bfloat16(), None),
        (x, index, weight.transpose(0, 1).contiguous().transpose(0, 1), None),
        (x, index, weight, bias[:3]),
        (x, index, weight, bias.bfloat16()),
    ]
    for rows, places, parameters, own_bias in refused:
        with pytest.raises(PlanError):
            best_kernels.expert_linear(rows, places, parameters, own_bias)
