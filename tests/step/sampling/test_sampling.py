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

from optimum_neuron.step.sampling.eager_sampling import sample_by_sorting
from optimum_neuron.step.sampling.exact_sums import to_float
from optimum_neuron.step.sampling.sampler import draw_tokens, first_largest, kept_weights, sample, weights_of


VOCAB = 40
DRAWS = 20_000
# Seeded, hence not flaky: a right sampler passes for all of these cases or for none.
SMALLEST_P_VALUE = 1e-3
BELOW_ONE = 1 - 2**-24


def fractions() -> st.SearchStrategy[float]:
    """From 0 to just below 1, float32; no subnormal numbers, which compiled code may flush to zero."""
    return st.floats(0, BELOW_ONE, width=32, allow_subnormal=False)


def random_logits(rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draw(
    logits: Tensor, uniforms: Tensor, *, k: float = 0, p: float = 1.0, temperature: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """One token per uniform from one row of logits."""
    params = torch.tensor([[k, p, temperature, min_p]])
    if temperature == 0 or len(uniforms) < 10:
        rows = len(uniforms)
        return sample(logits.expand(rows, -1), params.expand(rows, -1), uniforms)
    scores = logits / temperature
    weights = kept_weights(
        scores, scores.amax(-1, keepdim=True), torch.ones(logits.shape[1], dtype=torch.bool), params
    )
    return draw_tokens(weights.expand(-1, len(uniforms), -1), uniforms).to(torch.int32)


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


def warped_probabilities(logits: Tensor, k: int, p: float, temperature: float, min_p: float = 0.0) -> Tensor:
    ids = torch.zeros((1, 1), dtype=torch.int64)
    return torch.softmax(warpers(k, p, temperature, min_p)(ids, logits), dim=-1)[0].double()


def survival(chi_square: float, freedom: int) -> float:
    """P(X >= chi_square), by the series of the regularized incomplete gamma function."""
    a, x = freedom / 2, chi_square / 2
    term = total = 1 / a
    for n in range(1, 2000):
        term *= x / (a + n)
        total += term
    return 1 - total * math.exp(-x + a * math.log(x) - math.lgamma(a))


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Of Pearson's test, tokens expected less than five times pooled into one cell."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if expected[-1] < 1:
        observed, expected = observed[:-1], expected[:-1]
    return survival(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)


@pytest.mark.parametrize(("freedom", "critical"), [(1, 3.841), (5, 11.070), (30, 43.773)])
def test_the_chi_square_tail_agrees_with_the_printed_table(freedom: int, critical: float) -> None:
    assert survival(critical, freedom) == pytest.approx(0.05, abs=1e-4)


SETTINGS = [
    (0, 1.0, 1.0, 0.0),
    (5, 1.0, 1.0, 0.0),
    (1, 1.0, 1.0, 0.0),
    (0, 0.9, 1.0, 0.0),
    (20, 0.7, 0.5, 0.0),
    (10, 0.95, 1.7, 0.0),
    (0, 0.5, 2.0, 0.0),
    (0, 0.01, 1.0, 0.0),
    (0, 0.999, 1.0, 0.0),
    (0, 1.0, 1.3, 0.05),
    (0, 1.0, 0.7, 1.0),
    (0, 0.8, 1.0, 0.1),
    (30, 0.95, 0.9, 0.02),
    (2, 1.0, 3.0, 0.3),
    (7, 1.0, 0.6, 0.0),
    (0, 0.97, 1.4, 0.0),
]


@pytest.mark.parametrize(("k", "p", "temperature", "min_p"), SETTINGS)
def test_draws_follow_the_distribution_of_transformers(k: int, p: float, temperature: float, min_p: float) -> None:
    logits = random_logits()
    probabilities = warped_probabilities(logits, k, p, temperature, min_p)
    uniforms = torch.rand(DRAWS, generator=torch.Generator().manual_seed(7))
    drawn = draw(logits, uniforms, k=k, p=p, temperature=temperature, min_p=min_p)
    counts = torch.bincount(drawn.long(), minlength=VOCAB)
    assert counts[probabilities == 0].sum() == 0
    if (probabilities > 0).sum() > 1:
        assert p_value(counts, probabilities) > SMALLEST_P_VALUE


@pytest.mark.parametrize("vocab", [7, 300, 4099, 9001])
@pytest.mark.parametrize(("k", "p", "temperature", "min_p"), SETTINGS)
def test_the_kept_tokens_are_those_of_transformers(
    vocab: int, k: int, p: float, temperature: float, min_p: float
) -> None:
    logits = torch.randn(16, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    warped = warpers(k, p, temperature, min_p)(torch.zeros((16, 1), dtype=torch.int64), logits.double())
    scores = logits / temperature
    params = torch.tensor([[k, p, temperature, min_p]]).expand(16, -1)
    weights = kept_weights(scores, scores.amax(-1, keepdim=True), torch.ones(vocab, dtype=torch.bool), params)
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


@pytest.mark.parametrize("vocab", [64, 4096, 4097, 49_152])
def test_large_vocabularies_are_sampled_as_by_whole_numbers(vocab: int) -> None:
    random = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(6, vocab, generator=random) * 3).bfloat16().float()  # with ties
    params = [(*SETTINGS[i][:2], SETTINGS[i][2], SETTINGS[i][3]) for i in (0, 4, 7, 8, 9, 12)]
    uniforms = torch.rand(6, generator=random)
    uniforms[0] = BELOW_ONE
    logits[3] = logits[3] * 1e-3  # a sum of weights of many digits
    found = sample(logits, torch.tensor(params), uniforms)
    assert torch.equal(found, sample_by_sorting(logits, torch.tensor(params), uniforms))
    assert found.tolist() == [choose_exactly(*each) for each in zip(logits, params, uniforms.tolist(), strict=True)]


def test_weights_are_exponentials() -> None:
    distances = torch.linspace(0, 17, 200_001)
    torch.testing.assert_close(
        weights_of(distances).double() * 2**-36, torch.exp(-distances.double()), rtol=4.5e-7, atol=2**-36
    )
    assert weights_of(torch.tensor([0.0, 25.0, 1e30, math.inf])).tolist() == [2**36, 0, 0, 0]


@pytest.mark.parametrize(("k", "kept"), [(1, 3), (2, 3), (4, 6), (5, 6), (7, 10), (9, 10), (11, VOCAB), (32, VOCAB)])
def test_all_that_are_tied_with_the_last_candidate_stay(k: int, kept: int) -> None:
    logits = torch.tensor([[4.0] * 3 + [3.0] * 3 + [2.5] * 4 + [1.0] * 30])[:, torch.randperm(VOCAB)]
    for temperature in (0.5, 1.7):
        probabilities = warped_probabilities(logits, k, 1.0, temperature)
        assert int((probabilities > 0).sum()) == kept
        uniforms = torch.rand(DRAWS, generator=torch.Generator().manual_seed(7))
        drawn = draw(logits, uniforms, k=k, temperature=temperature)
        counts = torch.bincount(drawn.long(), minlength=VOCAB)
        assert counts[probabilities == 0].sum() == 0
        assert p_value(counts, probabilities) > SMALLEST_P_VALUE


def test_the_test_of_distributions_tells_a_wrong_temperature() -> None:
    logits = random_logits()
    uniforms = torch.rand(DRAWS, generator=torch.Generator().manual_seed(7))
    counts = torch.bincount(draw(logits, uniforms, k=20, temperature=1.05).long(), minlength=VOCAB)
    assert p_value(counts, warped_probabilities(logits, 20, 1.0, 1.0)) < SMALLEST_P_VALUE


@given(st.integers(0, 1000), st.integers(1, VOCAB), fractions(), fractions())
def test_temperature_zero_is_the_argmax_whatever_else_is_asked(seed: int, k: int, p: float, uniform: float) -> None:
    logits = random_logits(seed=seed)
    assert draw(logits, torch.tensor([uniform]), k=k, p=p, temperature=0.0).item() == logits.argmax().item()


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38])
def test_a_vanishing_temperature_is_the_argmax(temperature: float) -> None:
    logits = random_logits()
    assert draw(logits, torch.tensor([BELOW_ONE]), temperature=temperature).item() == logits.argmax().item()


@pytest.mark.parametrize("tied", [[7, 3, 11], [0, 39], list(range(40))])
def test_the_lowest_of_tied_tokens_wins_at_temperature_zero(tied: list[int]) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, tied] = 5.0
    assert draw(logits, torch.zeros(1), temperature=0.0).item() == min(tied)


@pytest.mark.parametrize("uniform", [0.0, 0.5, BELOW_ONE])
@pytest.mark.parametrize("p", [0.0, 1e-6])
def test_top_p_zero_keeps_the_most_probable_token(p: float, uniform: float) -> None:
    logits = random_logits()
    assert draw(logits, torch.tensor([uniform]), p=p).item() == logits.argmax().item()


@pytest.mark.parametrize("k", [0, 1, 2, 7, VOCAB])
def test_a_uniform_just_below_one_gives_the_last_kept_token(k: int) -> None:
    logits = torch.linspace(0.1, 0.0, VOCAB)[None]
    assert draw(logits, torch.tensor([BELOW_ONE]), k=k).item() == (k or VOCAB) - 1
    assert draw(logits, torch.zeros(1), k=k).item() == 0


@examples(100)
@given(st.integers(0, 10_000), st.integers(1, VOCAB), fractions(), st.sampled_from([0.05, 0.5, 1.0, 5.0]))
def test_only_kept_tokens_are_drawn_even_at_the_ends(seed: int, k: int, p: float, temperature: float) -> None:
    logits = random_logits(seed=seed)
    drawn = draw(logits, torch.tensor([0.0, 0.25, 0.5, 0.999, BELOW_ONE]), k=k, p=p, temperature=temperature)
    assert set(drawn.tolist()) <= set(logits[0].topk(k).indices.tolist())


@pytest.mark.parametrize("k", [0, -1, VOCAB, VOCAB + 1, 2**40])
def test_a_top_k_below_one_or_above_the_vocabulary_is_none(k: int) -> None:
    logits, uniforms = random_logits(), torch.linspace(0, BELOW_ONE, 500)
    assert torch.equal(draw(logits, uniforms, k=k), draw(logits, uniforms))
    assert len(draw(logits, uniforms, k=k).unique()) > 5


def test_rows_are_independent() -> None:
    logits, uniforms = random_logits(rows=4), torch.tensor([0.1, 0.9, 0.4, 0.7])
    params = torch.tensor([[5, 1.0, 1.0, 0.0], [0, 0.8, 2.0, 0.0], [1, 1.0, 0.0, 0.0], [32, 0.3, 0.7, 0.1]])
    together = sample(logits, params, uniforms)
    alone = [sample(logits[i : i + 1], params[i : i + 1], uniforms[i : i + 1]) for i in range(4)]
    assert torch.equal(together, torch.cat(alone))
    logits[1] = float("nan")
    assert sample(logits, params, uniforms)[[0, 2, 3]].tolist() == together[[0, 2, 3]].tolist()


def test_a_larger_uniform_never_gives_an_earlier_token() -> None:
    drawn = draw(random_logits(), torch.linspace(0, BELOW_ONE, 5000), p=0.95).long()
    assert (drawn.diff() >= 0).all()
    assert len(drawn.unique()) > 5


def test_tokens_are_a_function_of_the_uniforms_and_are_int32() -> None:
    logits, uniforms = random_logits(), torch.rand(100)
    drawn = draw(logits, uniforms, p=0.9)
    assert drawn.dtype == torch.int32
    assert torch.equal(drawn, draw(logits, uniforms, p=0.9))


def test_rows_that_are_not_finite_give_the_argmax_however_they_are_sampled() -> None:
    logits = random_logits(rows=5)
    logits[0], logits[1, [7, 3]], logits[2, 20:] = torch.nan, torch.nan, torch.nan
    logits[3], logits[4, :9] = -torch.inf, torch.inf
    assert torch.equal(first_largest(logits)[:, 0].long(), logits.argmax(-1))  # where NaN is the largest
    for k, p, temperature in ((1, 1.0, 0.0), (0, 0.9, 1.0), (5, 0.0, 0.3)):
        params = torch.tensor([[k, p, temperature, 0.0]]).expand(5, -1)
        for uniform in (0.0, 0.5, BELOW_ONE):
            assert torch.equal(sample(logits, params, torch.full((5,), uniform)).long(), logits.argmax(-1))
