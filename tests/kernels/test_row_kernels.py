# SPDX-License-Identifier: Apache-2.0
"""Rows of tables and caches: read and written to the bit by the kernels of every instruction set, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import Kernels, RefusedError, check_guards, guarded, int32, same_bits


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


def test_rows_that_are_not_there_are_refused(kernels: Kernels) -> None:
    source = torch.randn(4, 7, 5)
    for dim, wrong in ((0, 4), (0, -1), (1, 7), (2, 5), (2, 2**31 - 1)):
        for index_type in (torch.int32, torch.int64):
            shape = [*source.shape]
            shape[dim] = 3
            output = guarded(shape, torch.float32)
            output.fill_(7)
            with pytest.raises(RefusedError):
                kernels.select(source, torch.tensor([0, 1, wrong], dtype=index_type), dim, output=output)
            assert (output == 7).all()


def test_negative_numbers_count_from_the_end_where_torch_has_it_so(kernels: Kernels) -> None:
    source = torch.randn(4, 7, 5)
    index = torch.tensor([-7, 6, -1, 0])
    assert same_bits(kernels.select(source, index, 1, wraps=True), source[:, index])
    for wrong in (-8, 7):
        with pytest.raises(RefusedError):
            kernels.select(source, torch.tensor([0, wrong]), 1, wraps=True)


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
