# SPDX-License-Identifier: Apache-2.0
"""Attention computed in parts: merging two sets of keys, and what a token sees of compressed ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optimum_neuron.graphs.attention import merge_attention_states, visible_groups


NOTHING = (-math.inf, math.inf, math.nan)
ROWS, HEADS, DIM = 3, 2, 8


def attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """`[rows, heads, dim]` over `[keys, heads, dim]`, in float64; a row that sees nothing is NaN with lse -inf."""
    scores = torch.einsum("rhd,khd->rhk", query.double(), keys.double())
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    return torch.einsum("rhk,khd->rhd", scores.softmax(-1), values.double()), scores.logsumexp(-1)


@settings(max_examples=60, deadline=None)
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


@pytest.mark.parametrize("one", NOTHING)
@pytest.mark.parametrize("other", NOTHING)
def test_two_empty_sides_give_zero_and_stay_empty(one: float, other: float) -> None:
    garbage = torch.full((ROWS, HEADS, DIM), math.nan)
    out, lse = merge_attention_states(
        garbage, torch.full((ROWS, HEADS), one), garbage, torch.full((ROWS, HEADS), other)
    )
    assert (out == 0).all() and (lse == -math.inf).all()
    again, _ = merge_attention_states(out, lse, torch.ones(ROWS, HEADS, DIM), torch.zeros(ROWS, HEADS))
    assert (again == 1).all()


def test_merging_can_be_exported() -> None:
    class Merge(torch.nn.Module):
        def forward(self, *states: Tensor) -> tuple[Tensor, Tensor]:
            return merge_attention_states(*states)

    states = torch.randn(ROWS, DIM), torch.zeros(ROWS), torch.randn(ROWS, DIM), torch.full((ROWS,), -math.inf)
    program = torch.export.export(Merge(), states)
    assert torch.equal(program.module()(*states)[0], states[0])


@given(st.integers(1, 9), st.integers(-1, 60))
def test_a_token_sees_the_groups_that_end_at_or_before_it(ratio: int, position: int) -> None:
    mask = visible_groups(torch.tensor([[position]]), ratio, 70)[0, 0]
    assert mask.tolist() == [(group + 1) * ratio - 1 <= position for group in range(70)]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_what_a_token_sees_of_compressed_keys_does_not_depend_on_its_chunk(ratio: int, pieces: list[int]) -> None:
    length = sum(pieces)
    keys = torch.randn(length, DIM, dtype=torch.float64)
    compressed = torch.stack([keys[i : i + ratio].mean(0) for i in range(0, length, ratio)])
    whole = visible_groups(torch.arange(length)[None], ratio, len(compressed))[0].double() @ compressed
    start = 0
    for count in pieces:
        # Groups that the chunk has not reached hold garbage.
        known = compressed.clone()
        known[(start + count) // ratio :] = 1e9
        mask = visible_groups(torch.arange(start, start + count)[None], ratio, len(compressed))[0]
        torch.testing.assert_close(mask.double() @ known, whole[start : start + count])
        start += count
