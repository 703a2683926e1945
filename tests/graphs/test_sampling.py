# SPDX-License-Identifier: Apache-2.0
"""The on-device sampler draws from the distribution of transformers' warpers, and is a function of its uniforms."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from optimum_neuron.graphs import sampling
from optimum_neuron.graphs.sampling import first_largest, sample


VOCAB, MAX_TOPK = 40, 32
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
    logits: Tensor,
    uniforms: Tensor,
    *,
    k: float = MAX_TOPK,
    p: float = 1.0,
    temperature: float = 1.0,
    max_topk: int = MAX_TOPK,
) -> Tensor:
    """One token per uniform from one row of logits."""
    rows = len(uniforms)
    params = torch.tensor([[k, p, temperature]]).expand(rows, -1)
    return sample(logits.expand(rows, -1), params, uniforms, max_topk)


def warped_probabilities(logits: Tensor, k: int, p: float, temperature: float) -> Tensor:
    """transformers' order: temperature, top-k, top-p."""
    ids = torch.zeros((1, 1), dtype=torch.int64)
    scores = TemperatureLogitsWarper(temperature)(ids, logits)
    scores = TopKLogitsWarper(k)(ids, scores)
    if p < 1.0:
        scores = TopPLogitsWarper(p)(ids, scores)
    return torch.softmax(scores, dim=-1)[0].double()


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


@pytest.mark.parametrize(
    ("k", "p", "temperature"),
    [(32, 1.0, 1.0), (5, 1.0, 1.0), (32, 0.9, 1.0), (20, 0.7, 0.5), (10, 0.95, 1.7), (32, 0.5, 2.0), (2, 1.0, 3.0)],
)
def test_draws_follow_the_distribution_of_transformers(k: int, p: float, temperature: float) -> None:
    logits = random_logits()
    probabilities = warped_probabilities(logits, k, p, temperature)
    uniforms = torch.rand(DRAWS, generator=torch.Generator().manual_seed(7))
    counts = torch.bincount(draw(logits, uniforms, k=k, p=p, temperature=temperature).long(), minlength=VOCAB)
    assert counts[probabilities == 0].sum() == 0
    assert p_value(counts, probabilities) > SMALLEST_P_VALUE


@pytest.mark.parametrize(("k", "kept"), [(1, 3), (2, 3), (4, 6), (5, 6), (7, 10), (9, 10), (11, VOCAB), (32, VOCAB)])
def test_all_that_are_tied_with_the_last_candidate_stay(k: int, kept: int) -> None:
    logits = torch.tensor([[4.0] * 3 + [3.0] * 3 + [2.5] * 4 + [1.0] * 30])[:, torch.randperm(VOCAB)]
    for temperature in (0.5, 1.7):
        probabilities = warped_probabilities(logits, k, 1.0, temperature)
        assert int((probabilities > 0).sum()) == kept
        uniforms = torch.rand(DRAWS, generator=torch.Generator().manual_seed(7))
        drawn = draw(logits, uniforms, k=k, temperature=temperature, max_topk=VOCAB)
        counts = torch.bincount(drawn.long(), minlength=VOCAB)
        assert counts[probabilities == 0].sum() == 0
        assert p_value(counts, probabilities) > SMALLEST_P_VALUE


def test_the_test_of_distributions_tells_a_wrong_temperature() -> None:
    logits = random_logits()
    uniforms = torch.rand(DRAWS, generator=torch.Generator().manual_seed(7))
    counts = torch.bincount(draw(logits, uniforms, k=20, temperature=1.05).long(), minlength=VOCAB)
    assert p_value(counts, warped_probabilities(logits, 20, 1.0, 1.0)) < SMALLEST_P_VALUE


@given(st.integers(0, 1000), st.integers(1, MAX_TOPK), fractions(), fractions())
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


@pytest.mark.parametrize("k", [1, 2, 7, MAX_TOPK])
def test_a_uniform_just_below_one_gives_the_last_kept_token(k: int) -> None:
    logits = torch.linspace(0.0, 0.1, VOCAB)[None]
    assert draw(logits, torch.tensor([BELOW_ONE]), k=k).item() == VOCAB - k
    assert draw(logits, torch.zeros(1), k=k).item() == VOCAB - 1


def test_rounding_of_the_total_never_steps_past_the_last_kept_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded_up(probs: Tensor) -> Tensor:
        return probs.cumsum(-1) * (1 + 1e-6 * torch.arange(probs.shape[-1]))

    monkeypatch.setattr(sampling, "_cumulative", rounded_up)
    logits = torch.linspace(0.0, 0.1, VOCAB)[None]
    assert draw(logits, torch.tensor([BELOW_ONE]), k=7).item() == VOCAB - 7


@examples(100)
@given(st.integers(0, 10_000), st.integers(1, MAX_TOPK), fractions(), st.sampled_from([0.05, 0.5, 1.0, 5.0]))
def test_only_kept_tokens_are_drawn_even_at_the_ends(seed: int, k: int, p: float, temperature: float) -> None:
    logits = random_logits(seed=seed)
    drawn = draw(logits, torch.tensor([0.0, 0.25, 0.5, 0.999, BELOW_ONE]), k=k, p=p, temperature=temperature)
    assert set(drawn.tolist()) <= set(logits[0].topk(k).indices.tolist())


def test_a_top_k_above_the_vocabulary_keeps_all_of_it() -> None:
    logits = random_logits()
    uniforms = torch.rand(DRAWS, generator=torch.Generator().manual_seed(3))
    drawn = draw(logits, uniforms, k=256, max_topk=256)
    assert torch.equal(drawn, draw(logits, uniforms, k=VOCAB, max_topk=VOCAB))
    assert p_value(torch.bincount(drawn.long(), minlength=VOCAB), warped_probabilities(logits, VOCAB, 1.0, 1.0)) > 1e-3


def test_a_top_k_below_one_keeps_the_most_probable_token() -> None:
    logits = random_logits()
    assert draw(logits, torch.tensor([0.9]), k=0).item() == logits.argmax().item()


def test_rows_are_independent() -> None:
    logits, uniforms = random_logits(rows=4), torch.tensor([0.1, 0.9, 0.4, 0.7])
    params = torch.tensor([[5, 1.0, 1.0], [32, 0.8, 2.0], [1, 1.0, 0.0], [32, 0.3, 0.7]])
    together = sample(logits, params, uniforms, MAX_TOPK)
    alone = [sample(logits[i : i + 1], params[i : i + 1], uniforms[i : i + 1], MAX_TOPK) for i in range(4)]
    assert torch.equal(together, torch.cat(alone))
    logits[1] = float("nan")
    assert sample(logits, params, uniforms, MAX_TOPK)[[0, 2, 3]].tolist() == together[[0, 2, 3]].tolist()


def test_a_larger_uniform_never_gives_a_more_probable_token() -> None:
    logits = random_logits()
    rank = torch.empty(VOCAB, dtype=torch.int64)
    rank[logits[0].argsort(descending=True)] = torch.arange(VOCAB)
    drawn = rank[draw(logits, torch.linspace(0, BELOW_ONE, 5000), p=0.95).long()]
    assert (drawn.diff() >= 0).all()
    assert drawn[0] == 0 and drawn[-1] > 5


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
    for k, p, temperature in ((1, 1.0, 0.0), (MAX_TOPK, 0.9, 1.0), (5, 0.0, 0.3)):
        params = torch.tensor([[k, p, temperature]]).expand(5, -1)
        for uniform in (0.0, 0.5, BELOW_ONE):
            assert torch.equal(sample(logits, params, torch.full((5,), uniform), MAX_TOPK).long(), logits.argmax(-1))
