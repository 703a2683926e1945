# SPDX-License-Identifier: Apache-2.0
"""A top-k without a sort is torch's: the same values, and of equal ones those with the lowest indices, in their order."""

from __future__ import annotations

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from optimum_neuron.targets.neuron.lowering.decompositions import LARGEST_K, top_k


LOWEST = torch.finfo(torch.float32).min


def first_of_equals(x: Tensor, k: int, dim: int) -> tuple[Tensor, Tensor]:
    values, indices = torch.sort(x, dim=dim, descending=True, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


@examples(150)
@given(
    st.integers(0, 2**32),
    st.integers(1, LARGEST_K),
    st.integers(0, 48),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([-1, 0, 1]),
    st.booleans(),
)
def test_it_is_the_beginning_of_a_stable_sort(
    seed: int, k: int, more: int, dtype: torch.dtype, dim: int, tied: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = [3, 3]
    shape[dim] = k + more
    x = torch.randint(-2, 3, shape, generator=generator) if tied else torch.randn(shape, generator=generator)
    x = x.to(dtype)
    (values, indices), (expected, places) = top_k(x, k, dim), first_of_equals(x, k, dim)
    assert torch.equal(indices, places) and torch.equal(values, expected)
    assert values.dtype == dtype and torch.equal(values, torch.topk(x, k, dim).values)


@pytest.mark.parametrize(
    "row",
    [
        [1.0, torch.nan, 3.0, torch.inf, torch.nan, 2.0],
        [-torch.inf, -torch.inf, 0.5, -torch.inf],  # groups that are masked away
        [LOWEST, LOWEST, LOWEST, 1.0],
        [-torch.inf] * 5,
        [torch.nan] * 5,
        [0.0, -0.0, 0.0, -0.0],
    ],
)
def test_numbers_that_are_not_finite_are_chosen_as_by_torch(row: list[float]) -> None:
    x = torch.tensor([row])
    for k in range(1, len(row) + 1):
        (values, indices), (expected, places) = top_k(x, k), first_of_equals(x, k, -1)
        assert torch.equal(indices, places)
        assert torch.equal(values.nan_to_num(9.0), expected.nan_to_num(9.0))


@pytest.mark.parametrize(
    ("x", "options"),
    [
        (torch.ones(40), {"k": LARGEST_K + 1}),
        (torch.ones(40), {"k": 2, "largest": False}),
        (torch.ones(40, dtype=torch.int32), {"k": 2}),
    ],
)
def test_what_it_does_not_serve_is_left_to_the_lint(x: Tensor, options: dict[str, int]) -> None:
    assert top_k(x, **options) is NotImplemented
