# SPDX-License-Identifier: Apache-2.0
"""Attention over more columns than a section has, which threads share out: exact, and a token's bits its own."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import Kernels, int32, random, same_bits, with_dtypes
from test_kernels import ATTEND_ERROR, attend_exactly, make_cache


pytestmark = pytest.mark.usefixtures("torch_with_one_thread")
COLUMNS, HEADS, KV_HEADS, DIM = 3100, 6, 2, 32  # three sections, and some columns of a fourth
# None, within a section, and over more than one.
with_windows = pytest.mark.parametrize("window", [0, 700, 1500])
with_extras = pytest.mark.parametrize("extras", [False, True])


@pytest.fixture
def kernels(product_kernels: Kernels) -> Kernels:
    return product_kernels


@with_dtypes
@with_windows
@with_extras
def test_a_long_context_is_exact(kernels: Kernels, dtype: torch.dtype, window: int, extras: bool) -> None:
    options = (DIM**-0.5, window, 4.0 if extras else 0.0, torch.randn(HEADS) * 4 if extras else None)
    # At both sides of where sections meet, and of where a window leaves one.
    places = [0, 1022, 1023, 1024, 1722, 1723, 1724, 2047, 2048, 2523, 2524, 3071, 3072, 3099, -1, 5]
    keys, values = make_cache(1, KV_HEADS, COLUMNS + 30, DIM, {0: COLUMNS - 1}, dtype)
    query = random(1, HEADS, len(places), DIM, dtype=dtype) * 2
    inputs = (query, keys, values, None, int32([places]), *options)
    exact = attend_exactly(*inputs)
    results = []
    for threads in (1, 2, 5):
        with kernels.with_threads(threads):
            results.append(kernels.attend(*inputs))
    assert (results[0].double() - exact).abs().max() < 2 * ATTEND_ERROR[dtype]
    assert not results[0][0, places.index(-1)].any()
    assert all(same_bits(each, results[0]) for each in results[1:])


@with_dtypes
@with_windows
@with_extras
def test_a_token_of_a_long_context_depends_on_nothing_else(
    kernels: Kernels, dtype: torch.dtype, window: int, extras: bool
) -> None:
    options = (DIM**-0.5, window, 4.0 if extras else 0.0, torch.randn(HEADS) if extras else None)
    tokens = 75  # over the end of a section
    positions = torch.arange(COLUMNS - tokens, COLUMNS, dtype=torch.int32)[None]
    keys, values = make_cache(2, KV_HEADS, COLUMNS, DIM, {1: COLUMNS - 1}, dtype)
    query, slot = random(1, HEADS, tokens, DIM, dtype=dtype), int32([1])
    whole = kernels.attend(query, keys, values, slot, positions, *options)
    alone = query.permute(2, 1, 0, 3)
    for chosen in ([74], [0, 46, 47, 48], list(range(tokens))):
        # One token a row, with an idle one; the few and the many are shared out otherwise.
        where = torch.cat([positions[0, chosen], int32([-1])])[:, None].contiguous()
        rows = torch.cat([alone[chosen], alone[:1]]).contiguous()
        decoded = kernels.attend(rows, keys, values, slot.expand(len(rows)).contiguous(), where, *options)
        assert same_bits(decoded[:-1, 0], whole[0, chosen]) and not decoded[-1].any()
    for size in (1, 9, 40):
        with kernels.with_threads(3):
            part = kernels.attend(query[:, :, -size:], keys, values, slot, positions[:, -size:].contiguous(), *options)
        assert same_bits(part[0], whole[0, -size:])


@with_dtypes
def test_what_is_not_finite_shows_to_who_sees_it_alone(kernels: Kernels, dtype: torch.dtype) -> None:
    keys, values = make_cache(2, 1, COLUMNS, DIM, {0: COLUMNS - 1, 1: COLUMNS - 1}, dtype)
    query, positions = random(1, 3, 1, DIM, dtype=dtype), int32([[COLUMNS - 1]])
    clean = kernels.attend(query, keys, values, int32([0]), positions, 0.2, 1500)
    for column in (1024, 1599, 1600, 2500, 3099):
        for states in (keys, values):
            kept = states[0, :, column].clone()
            states[0, :, column] = float("nan")
            found = kernels.attend(query, keys, values, int32([0]), positions, 0.2, 1500)
            states[0, :, column] = kept
            assert found.isnan().all() if column >= COLUMNS - 1500 else same_bits(found, clean), column
