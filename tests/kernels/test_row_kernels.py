# SPDX-License-Identifier: Apache-2.0
"""Rows of tables and caches, read and written to the bit and nowhere else; and rows of logits, from which tokens are those of the reference."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import Kernels, RefusedError, check_guards, guarded, int32, same_bits
from torch import Tensor

from optimum_neuron.step.sampling.sampler import sample_by_sorting as sample


pytestmark = pytest.mark.usefixtures("torch_with_one_thread")
ROW_TYPES = (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", ROW_TYPES, ids=str)
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64], ids=str)
def test_rows_are_selected_as_torch_does(kernels: Kernels, dtype: torch.dtype, index_type: torch.dtype) -> None:
    source = (torch.randn(7, 11, 5) * 10).to(dtype)
    for dim, size in enumerate(source.shape):
        index = torch.randint(0, size, (13,), dtype=index_type)
        assert same_bits(kernels.select(source, index, dim), source.index_select(dim, index))
    index, long = torch.randint(0, 7, (2, 3), dtype=index_type), torch.arange(7 * 4099).view(7, 4099).to(dtype)
    for count in (1, 3):
        with kernels.with_threads(count):
            assert all(same_bits(kernels.select(each, index), each[index.long()]) for each in (source, long))


def test_rows_that_are_not_there_are_refused_and_negative_ones_count_from_the_end_where_torch_has_it_so(
    kernels: Kernels,
) -> None:
    source, index = torch.randn(4, 7, 5), torch.tensor([-7, 6, -1, 0])
    assert same_bits(kernels.select(source, index, 1, wraps=True), source[:, index])
    wrong = [(dim, each, False) for dim, each in ((0, 4), (0, -1), (1, 7), (2, 5), (2, 2**31 - 1))]
    for dim, each, wraps in (*wrong, (1, -8, True), (1, 7, True)):
        for index_type in (torch.int32, torch.int64):
            shape = [*source.shape]
            shape[dim] = 3
            output = guarded(shape, torch.float32)
            output.fill_(7)
            with pytest.raises(RefusedError):
                kernels.select(source, torch.tensor([0, 1, each], dtype=index_type), dim, wraps=wraps, output=output)
            assert (output == 7).all()


@pytest.mark.parametrize("dtype", ROW_TYPES, ids=str)
def test_states_are_written_to_their_slots_and_columns_and_nowhere_else(kernels: Kernels, dtype: torch.dtype) -> None:
    cache = guarded((4, 2, 9, 6), dtype)
    cache.copy_((torch.randn(4, 2, 9, 6) * 10).to(dtype))
    rows, columns = int32([3, 0, 0, 3]), int32([8, 0, 5, 7])
    wide = (torch.randn(2, 4, 3, 6) * 10).to(dtype)
    for states in (wide[0, :, :2].contiguous(), wide[:, :, 1].transpose(0, 1), wide[0, :, :1].expand(4, 2, 6)):
        expected = cache.clone()
        expected[rows.long(), :, columns.long()] = states
        kernels.write_cache(cache, states, rows, columns)
        check_guards(cache)
        assert same_bits(cache, expected)


def test_of_tokens_at_one_place_the_last_one_stays_and_places_that_are_not_there_are_refused(kernels: Kernels) -> None:
    cache, states = torch.zeros(2, 1, 3, 4), torch.randn(3, 1, 4)
    kernels.write_cache(cache, states, int32([1, 1, 1]), int32([2, 0, 2]))
    assert same_bits(cache[1, :, 2], states[2]) and same_bits(cache[1, :, 0], states[1])
    cache = torch.zeros(4, 2, 9, 6)
    for row, column in ((4, 0), (-1, 0), (0, 9), (0, -1)):
        with pytest.raises(RefusedError):
            kernels.write_cache(cache, torch.ones(2, 2, 6), int32([1, row]), int32([1, column]))
        assert not cache.any()


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
