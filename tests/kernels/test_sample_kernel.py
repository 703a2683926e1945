# SPDX-License-Identifier: Apache-2.0
"""The sampler's kernel chooses the tokens of step/sampling/sampler.py, whatever the row, its parameters and the instruction set."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import Kernels
from torch import Tensor

from optimum_neuron.step.sampling.sampler import sample_by_sorting as sample


BELOW_ONE = 1 - 2**-24
TOP_KS = (0, 1, 2, 5, 149, 150, 5000, 2.0**40)
TOP_PS = (0.0, 1e-300, 1e-7, 0.3, 0.9, BELOW_ONE, 1.0)
TEMPERATURES = (0.0, 1e-38, 1e-6, 0.3, 0.7, 1.0, 1.3, 30.0, 1e6, 3e38)
MIN_PS = (0.0, 0.0, 1e-300, 1e-9, 0.1, 1.0)


def random_params(rows: int, random: torch.Generator) -> Tensor:
    columns = [
        torch.tensor(values)[torch.randint(len(values), (rows,), generator=random)]
        for values in (TOP_KS, TOP_PS, TEMPERATURES, MIN_PS)
    ]
    return torch.stack(columns, dim=1)


def logits_of_all_kinds() -> st.SearchStrategy[list[float]]:
    """Logits with ties, infinities, NaN and both zeros among them."""
    common = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, 7.0, 7.5])
    rare = st.sampled_from([math.inf, -math.inf, math.nan, 3e38, -3e38])
    other = st.floats(-20, 20, width=32, allow_subnormal=False)
    return st.lists(common | common | other | rare, min_size=1, max_size=150)


@examples(200)
@given(logits_of_all_kinds(), st.integers(0, 1000), st.floats(0, BELOW_ONE, width=32, allow_subnormal=False))
def test_tokens_of_small_rows_are_those_of_the_reference(
    best_kernels: Kernels, row: list[float], seed: int, uniform: float
) -> None:
    params = random_params(8, torch.Generator().manual_seed(seed))
    logits, uniforms = torch.tensor([row] * 8), torch.full((8,), uniform)
    assert torch.equal(best_kernels.sample(logits, params, uniforms), sample(logits, params, uniforms))


SIZES = [(1, 1.0), (15, 8.0), (1024, 1e-3), (4099, 1.0), (65_536, 8.0), (135_001, 1e-3), (135_001, 8.0)]


@pytest.mark.parametrize(("vocab", "spread"), SIZES)
def test_tokens_of_large_rows_are_those_of_the_reference(kernels: Kernels, vocab: int, spread: float) -> None:
    random = torch.Generator().manual_seed(vocab)
    logits = torch.randn(12, vocab, generator=random) * spread
    logits[::2] = logits[::2].bfloat16().float()  # with ties
    logits[3, vocab // 2 :] = -torch.inf
    logits[5, vocab // 3] = torch.nan
    params, uniforms = random_params(12, random), torch.rand(12, generator=random)
    uniforms[2], uniforms[4] = BELOW_ONE, 0.0
    expected = sample(logits, params, uniforms)
    for threads in (1, 3):
        with kernels.with_threads(threads):
            assert torch.equal(kernels.sample(logits, params, uniforms), expected)


def test_the_largest_logit_is_the_first_of_its_ties_wherever_it_stands(kernels: Kernels) -> None:
    for first in (0, 3, 1023, 1024, 65_535, 65_536, 139_999):
        for value in (9.0, torch.inf, torch.nan):
            logits = torch.zeros(1, 140_000)
            logits[0, [first, 139_999]] = value
            token = kernels.sample(logits, torch.zeros(1, 4), torch.zeros(1))
            assert token.tolist() == [first]


def test_rows_may_lie_apart_and_only_those_asked_for_are_read(kernels: Kernels) -> None:
    memory = torch.full((5, 300), torch.nan)
    memory[1:4, :257] = torch.randn(3, 257)
    params, uniforms = torch.tensor([[0, 1.0, 1.0, 0.0], [9, 0.7, 1.0, 0.1], [0, 1.0, 0.0, 0.0]]), torch.rand(3)
    logits = memory[1:4, :257]
    assert torch.equal(kernels.sample(logits, params, uniforms), sample(logits, params, uniforms))
