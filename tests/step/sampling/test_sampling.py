# SPDX-License-Identifier: Apache-2.0
"""The on-device sampler draws from the distribution of transformers' warpers, and is a function of its uniforms."""

from __future__ import annotations

import math

import pytest
import torch
from exact_sampler import choose_exactly
from helpers import examples
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from optimum_neuron.step.sampling.exact_sums import FloatSteps, largest_float, to_float
from optimum_neuron.step.sampling.sampler import kept_weights, sample, sample_by_sorting, weights_of


BELOW_ONE = 1 - 2**-24
SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max


def warpers(k: int, p: float, temperature: float, min_p: float = 0.0) -> LogitsProcessorList:
    """transformers' own, in the order in which its generate applies them."""
    found = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if k:
        found.append(TopKLogitsWarper(k))
    if p < 1.0:
        found.append(TopPLogitsWarper(p))
    if min_p:
        found.append(MinPLogitsWarper(min_p))
    return found


SETTINGS = [
    (0, 1.0, 1.0, 0.0),
    (5, 1.0, 1.0, 0.0),
    (1, 1.0, 1.0, 0.0),
    (0, 0.9, 1.0, 0.0),
    (20, 0.7, 0.5, 0.0),
    (0, 0.01, 1.0, 0.0),
    (0, 0.999, 1.0, 0.0),
    (0, 1.0, 1.3, 0.05),
    (0, 1.0, 0.7, 1.0),
    (30, 0.95, 0.9, 0.02),
]


@pytest.mark.parametrize("vocab", [7, 300, 4099, 9001])
@pytest.mark.parametrize(("k", "p", "temperature", "min_p"), SETTINGS)
def test_the_kept_tokens_are_those_of_transformers(
    vocab: int, k: int, p: float, temperature: float, min_p: float
) -> None:
    logits = torch.randn(16, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    warped = warpers(k, p, temperature, min_p)(torch.zeros((16, 1), dtype=torch.int64), logits.double())
    scores = logits / temperature
    params = torch.tensor([[k, p, temperature, min_p]]).expand(16, -1)
    weights = kept_weights(scores, scores.amax(-1, keepdim=True), params)
    expected, found = torch.softmax(warped, dim=-1), to_float(weights[:, :, :vocab].movedim(0, -1)).double()
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found / found.sum(-1, keepdim=True), expected, rtol=2e-6, atol=1e-10)


def rows_of_all_kinds() -> st.SearchStrategy[list[float]]:
    """Logits with ties, infinities, NaN, both zeros and subnormal numbers among them."""
    common = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, 7.0, 7.5])
    rare = st.sampled_from([math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3e38, -3e38])
    return st.lists(common | common | st.floats(-20, 20, width=32) | rare, min_size=1, max_size=150)


def extreme_params() -> st.SearchStrategy[tuple[float, float, float, float]]:
    return st.tuples(
        st.sampled_from([0, 1, 2, 5, 149, 150, 1e9]),
        st.sampled_from([0.0, 1e-300, 1e-7, 0.3, 0.9, BELOW_ONE, 1.0]),
        st.sampled_from([0.0, 1e-38, 1e-3, 0.7, 1.0, 100.0, 3e38]),
        st.sampled_from([0.0, 1e-300, 1e-9, 0.1, 0.5, 1.0]),
    )


@example([7.0, 7.0 + 2**-21], (1, 1.0, 1.0, 0.0), 0.0)  # neighbours in float32
@examples(300)
@given(rows_of_all_kinds(), extreme_params(), st.floats(0, BELOW_ONE, width=32))
def test_tokens_are_those_of_a_sort_and_whole_numbers(
    row: list[float], params: tuple[float, float, float, float], uniform: float
) -> None:
    logits = torch.tensor([row])
    expected = choose_exactly(logits[0], params, uniform)
    for formulation in (sample, sample_by_sorting):
        found = formulation(logits, torch.tensor([params]), torch.tensor([uniform]))
        assert found.tolist() == [expected]


@pytest.mark.parametrize("vocab", [64, 255, 256, 257, 4096, 4097, 8191, 12_289, 49_152])
def test_large_vocabularies_are_sampled_as_by_whole_numbers(vocab: int) -> None:
    random = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(6, vocab, generator=random) * 3).bfloat16().float()  # with ties
    params = [SETTINGS[i] for i in (0, 4, 5, 6, 7, 9)]
    uniforms = torch.rand(6, generator=random)
    uniforms[0] = BELOW_ONE
    logits[3] *= 1e-3  # a sum of weights of many digits
    logits[4] = 0.0  # the largest sum
    found = sample(logits, torch.tensor(params), uniforms)
    assert torch.equal(found, sample_by_sorting(logits, torch.tensor(params), uniforms))
    assert found.tolist() == [choose_exactly(*each) for each in zip(logits, params, uniforms.tolist(), strict=True)]


def test_weights_are_exponentials() -> None:
    distances = torch.linspace(0, 17, 200_001)
    torch.testing.assert_close(
        weights_of(distances).double() * 2**-36, torch.exp(-distances.double()), rtol=4.5e-7, atol=2**-36
    )
    assert weights_of(torch.tensor([0.0, 25.0, 1e30, math.inf])).tolist() == [2**36, 0, 0, 0]


def edges() -> st.SearchStrategy[float]:
    """The first and the last number of each kind."""
    sizes = 0.0, SMALLEST, 3 * SMALLEST, 2.0**-126 - SMALLEST, 2.0**-126, BELOW_ONE, 1.0, 1 + 2**-23, LARGEST, math.inf
    return st.sampled_from([sign * size for size in sizes for sign in (1, -1)])


@examples(300)
@given(edges() | st.floats(width=32, allow_nan=False))
def test_a_search_over_float32_finds_each_number(number: float) -> None:
    def not_too_high(tried: Tensor) -> Tensor:
        assert (tried[:, 1:] >= tried[:, :-1]).all()
        return (tried <= number).float().sum(-1, keepdim=True)

    # Two digits are enough to tell whether one is carried to the next.
    steps = FloatSteps(((32.0, 16), (1.0, 32)), ((2.0**12, 2**11), (1.0, 2**12)))
    assert float(largest_float(not_too_high, torch.zeros(1, 1), steps)) == number
