# SPDX-License-Identifier: Apache-2.0
"""Sums of whole numbers in float32 digits are those of Python's integers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from optimum_neuron.step.sampling import exact_sums


BASE = 4096


def value(digits: Sequence[float]) -> int:
    number = 0
    for digit in digits:
        number = number * BASE + int(digit)
    return number


def random_digits(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(0)).float()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_digits_are_those_of_the_number(count: int) -> None:
    numbers = [0.0, 1.0, 4095.0, 4096.0, 4097.0, 2.0**24 - 1, 2.0**24, 2.0**36, 2.0**36 - 2.0**12, 2.0**59 + 2.0**36]
    fitting = [each for each in numbers if each < BASE**count]
    found = exact_sums.to_digits(torch.tensor(fitting), count)
    assert [value(each) for each in found.tolist()] == [int(each) for each in fitting]
    assert found.shape == (len(fitting), count) and bool((found < BASE).all())


def test_widened_digits_are_the_same_number_and_leave_room() -> None:
    digits = torch.cat([random_digits(50, 3, below=2**24), torch.full((1, 3), 2.0**24 - 1)])
    found = exact_sums.widen_digits(digits)
    assert [value(each) for each in found.tolist()] == [value(each) for each in digits.tolist()]
    assert found.shape[-1] == 4 and bool((found < 2 * BASE).all())


@pytest.mark.parametrize("size", [1, 257, 4097, 12289])
@pytest.mark.parametrize("digits", [1, 3])
def test_a_total_is_exact_over_any_number_of_tokens(size: int, digits: int) -> None:
    for tokens in (random_digits(digits, 2, size, below=BASE), torch.full((digits, 2, size), BASE - 1.0)):
        planes = exact_sums.pad_tokens(tokens, 0.0)
        if digits == 1:  # one alone numbers few tokens
            planes = (planes > 0).float()
        found = exact_sums.sum_tokens(planes)
        expected = planes[..., :size].long().sum(-1).T.tolist()
        assert [value(each) for each in found.tolist()] == [value(each) for each in expected]
