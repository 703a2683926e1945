# SPDX-License-Identifier: Apache-2.0
"""The own CPU kernel of experts: each row as `linears` computes it alone, whoever else is routed where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from optimum_neuron.targets.cpu import kernels


pytestmark = pytest.mark.skipif(not kernels.are_fast_here(), reason="the own kernels do not run here")
NAN = float("nan")
DTYPES = (torch.bfloat16, torch.float32)

with_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(sizes).to(dtype)


def row_by_row(ops: Any, x: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the dense kernel makes of each row alone, and zero where an index is none of an expert."""
    output = torch.zeros((*index.shape, weight.shape[1]), dtype=x.dtype)
    for token, places in enumerate(index.tolist()):
        for place, expert in enumerate(places):
            if expert < len(weight):
                row = x[token] if x.dim() == 2 else x[token, place]
                own = None if bias is None else bias[expert]
                output[token, place] = ops.linears(row[None], [weight[expert]], [own])[0][0]
    return output


# Experts, outputs and columns: no multiples of a vector, a tile or a panel, and more columns than a chunk has.
SHAPES = [(1, 1, 1), (4, 33, 31), (3, 130, 100), (7, 64, 64), (2, 5, 2050)]
# Tokens and experts of each.
ROUTES = [(1, 1), (1, 4), (5, 2), (13, 3), (72, 2)]


@with_dtypes
@pytest.mark.parametrize(("experts", "outputs", "columns"), SHAPES)
@pytest.mark.parametrize(("tokens", "k"), ROUTES)
def test_rows_are_those_of_the_dense_kernel(
    ops: Any, dtype: torch.dtype, experts: int, outputs: int, columns: int, tokens: int, k: int
) -> None:
    weight, bias = random(experts, outputs, columns, dtype=dtype), random(experts, outputs, dtype=dtype)
    index = torch.randint(0, experts + 2, (tokens, k))
    for x in (random(tokens, columns, dtype=dtype), random(tokens, k, columns, dtype=dtype)):
        for own_bias in (bias, None):
            result = ops.expert_linear(x, index, weight, own_bias)
            assert result.dtype == dtype
            assert torch.equal(result, row_by_row(ops, x, index, weight, own_bias))


@with_dtypes
def test_one_expert_may_get_all_tokens_or_none(ops: Any, dtype: torch.dtype) -> None:
    x, weight, bias = (random(*sizes, dtype=dtype) for sizes in ((50, 96), (4, 70, 96), (4, 70)))
    for expert in range(6):
        index = torch.full((50, 2), expert)
        result = ops.expert_linear(x, index, weight, bias)
        if expert < 4:
            expected = ops.linears(x, [weight[expert]], [bias[expert]])[0]
            assert torch.equal(result[:, 0], expected) and torch.equal(result[:, 1], expected)
        else:
            assert not result.any()


@with_dtypes
def test_experts_that_nobody_is_routed_to_are_not_read(ops: Any, dtype: torch.dtype) -> None:
    x, weight, bias = (random(*sizes, dtype=dtype) for sizes in ((9, 64), (5, 24, 64), (5, 24)))
    index = torch.tensor([[0, 3], [3, 5]] * 4 + [[5, 5]])
    clean = ops.expert_linear(x, index, weight, bias)
    weight[[1, 2, 4]], bias[[1, 2, 4]] = NAN, NAN
    x[8] = NAN  # routed nowhere
    assert torch.equal(ops.expert_linear(x, index, weight, bias), clean)
    assert not clean[8].any() and not clean[1, 1].any()


@examples(60)
@given(st.sampled_from(DTYPES), st.data())
def test_a_row_depends_on_itself_and_its_expert_only(ops: Any, dtype: torch.dtype, data: st.DataObject) -> None:
    experts, k = data.draw(st.integers(1, 9), "experts"), data.draw(st.integers(1, 4), "k")
    columns, outputs = data.draw(st.integers(1, 300), "columns"), data.draw(st.integers(1, 150), "outputs")
    tokens = data.draw(st.integers(1, 60), "tokens")
    x, weight = random(tokens, columns, dtype=dtype), random(experts, outputs, columns, dtype=dtype)
    index = torch.randint(0, experts + 1, (tokens, k))
    whole = ops.expert_linear(x, index, weight, None)
    some = torch.tensor(data.draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=8), "some"))
    assert torch.equal(ops.expert_linear(x[some], index[some], weight, None), whole[some])
    elsewhere = index.clone()
    elsewhere[some[0]] = torch.randint(0, experts + 1, (k,))
    others = torch.arange(tokens) != some[0]
    assert torch.equal(ops.expert_linear(x, elsewhere, weight, None)[others], whole[others])


def test_the_number_of_threads_changes_no_bit(ops: Any) -> None:
    x, weight = random(300, 512, dtype=torch.float32), random(16, 1024, 512, dtype=torch.float32)
    index = torch.randint(0, 17, (300, 4))
    index[:, 0] = 3  # one expert with more work than all others
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(ops.expert_linear(x, index, weight, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[1], results[0]) and torch.equal(results[2], results[0])
    assert torch.equal(results[0][:3], row_by_row(ops, x[:3], index[:3], weight, None))


def test_views_and_types_of_indices_are_taken_and_the_rest_is_refused(ops: Any) -> None:
    x, weight, bias = (random(*sizes, dtype=torch.float32) for sizes in ((6, 64), (4, 10, 64), (4, 10)))
    index = torch.randint(0, 4, (6, 2))
    expected = ops.expert_linear(x, index, weight, bias)
    assert torch.equal(ops.expert_linear(x.t().contiguous().t(), index, weight, bias), expected)
    assert torch.equal(ops.expert_linear(x, index.int().t().contiguous().t(), weight, bias), expected)
    refused: list[tuple[Tensor, Tensor, Tensor, Tensor | None, str]] = [
        (x[:0], index[:0], weight, None, "input \\[0, 64\\] is empty"),
        (x, index[:, :0], weight, None, "is empty"),
        (x.half(), index, weight.half(), None, "bfloat16 or float32 expected, not Half"),
        (x, index[:5], weight, None, "input \\[6, 64\\], index \\[5, 2\\]"),
        (random(6, 3, 64, dtype=torch.float32), index, weight, None, "input \\[6, 3, 64\\], index \\[6, 2\\]"),
        (x, index.float(), weight, None, "of Float is not"),
        (x, index[0], weight, None, "index \\[2\\] of Long is not"),
        (x, index - 5, weight, None, "is negative"),
        (x, index, weight[:, :, :60], None, "weight \\[4, 10, 60\\]"),
        (x, index, weight[0], None, "weight \\[10, 64\\]"),
        (x, index, weight.bfloat16(), None, "contiguous and Float"),
        (x, index, weight.transpose(0, 1).contiguous().transpose(0, 1), None, "contiguous and Float"),
        (x, index, weight, bias[:3], "bias of another size"),
        (x, index, weight, bias.double(), "contiguous and Float"),
    ]
    for rows, places, parameters, own_bias, words in refused:
        with pytest.raises(RuntimeError, match=words):
            ops.expert_linear(rows, places, parameters, own_bias)
