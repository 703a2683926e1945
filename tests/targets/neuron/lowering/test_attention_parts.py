# SPDX-License-Identifier: Apache-2.0
"""Attention in parts: merging attention over two sets of keys."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from optimum_neuron.targets.neuron.operators import attention as neuron
from optimum_neuron.targets.neuron.operators.attention_parts import merge_attention_states


# A log-sum-exp of no keys: exactly, and as masks leave it.
NOTHING = (-math.inf, neuron.MASKED, neuron.MASKED + 128.0)
ROWS, HEADS, DIM = 3, 2, 8


def attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[rows, heads, dim]` over `[keys, heads, dim]`, in float64; a row that sees nothing is NaN with lse -inf."""
    scores = torch.einsum("rhd,khd->rhk", query.double(), keys.double())
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    return torch.einsum("rhk,khd->rhd", scores.softmax(-1), values.double()), scores.logsumexp(-1)


@examples(60)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2**16), st.sampled_from([torch.float32, torch.bfloat16]))
def test_merged_parts_equal_attention_over_all_keys(first: int, second: int, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(ROWS, HEADS, DIM, generator=generator) * 3
    keys, values = (torch.randn(first + second, HEADS, DIM, generator=generator) for _ in range(2))
    visible = torch.rand(ROWS, first + second, generator=generator) < 0.6
    in_first = torch.arange(first + second) < first
    parts = [attend(query, keys, values, visible & part) for part in (in_first, ~in_first)]
    (out_a, lse_a), (out_b, lse_b) = [(out.to(dtype), lse.float()) for out, lse in parts]
    out, lse = merge_attention_states(out_a, lse_a, out_b, lse_b)
    expected, expected_lse = attend(query, keys, values, visible)
    seen = visible.any(-1)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert not out.isnan().any() and not lse.isnan().any()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(out[seen].double(), expected[seen], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse[seen].double(), expected_lse[seen], atol=1e-5, rtol=1e-5)
    assert (out[~seen] == 0).all() and (lse[~seen] == -math.inf).all()


@pytest.mark.parametrize("nothing", NOTHING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_side_leaves_the_other_to_the_bit_whatever_it_holds(nothing: float, dtype: torch.dtype) -> None:
    out, lse = torch.randn(ROWS, HEADS, DIM).to(dtype), torch.randn(ROWS, HEADS) * 50
    for garbage in (0.0, math.nan, math.inf):
        empty = torch.full_like(out, garbage), torch.full_like(lse, nothing)
        for merged, merged_lse in (
            merge_attention_states(out, lse, *empty),
            merge_attention_states(*empty, out, lse),
        ):
            assert torch.equal(merged, out) and torch.equal(merged_lse, lse)


def test_two_empty_sides_give_zero_and_stay_empty() -> None:
    garbage, nothing = torch.full((ROWS, HEADS, DIM), math.nan), torch.full((ROWS, HEADS), -math.inf)
    out, lse = merge_attention_states(garbage, nothing, garbage, nothing)
    assert (out == 0).all() and (lse == -math.inf).all()
    again, _ = merge_attention_states(out, lse, torch.ones(ROWS, HEADS, DIM), torch.zeros(ROWS, HEADS))
    assert (again == 1).all()


def test_a_side_that_saw_what_is_not_finite_stays_so() -> None:
    out, lse = torch.randn(ROWS, HEADS, DIM), torch.randn(ROWS, HEADS)
    broken = lse.clone()
    broken[1, 0] = math.nan
    for sides in ((out, lse, out, broken), (out, broken, out, lse)):
        joint, joint_lse = merge_attention_states(*sides)
        assert joint[1, 0].isnan().all() and joint_lse[1, 0].isnan()
        assert joint.isnan().sum() == DIM and joint_lse.isnan().sum() == 1


def test_merging_can_be_exported() -> None:
    class Merge(torch.nn.Module):
        def forward(self, *states: Tensor) -> tuple[Tensor, Tensor]:
            return merge_attention_states(*states)

    states = torch.randn(ROWS, DIM), torch.zeros(ROWS), torch.randn(ROWS, DIM), torch.full((ROWS,), -math.inf)
    program = torch.export.export(Merge(), states)
    assert torch.equal(program.module()(*states)[0], states[0])
