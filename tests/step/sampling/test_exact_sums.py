# SPDX-License-Identifier: Apache-2.0
"""Sums of whole numbers in float32 digits are those of Python's integers, and a search over float32 finds each number, to the bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from optimum_neuron.step.sampling import exact_sums
from optimum_neuron.step.sampling.exact_sums import FloatSteps, largest_float


BASE = 4096


def value(digits: Sequence[float]) -> int:
    number = 0
    for digit in digits:
        number = number * BASE + int(digit)
    return number


def random_digits(*shape: int, below: int, seed: int = 0) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed)).float()


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


@pytest.mark.parametrize("size", [1, 255, 256, 257, 4096, 4097, 8191, 12289])
@pytest.mark.parametrize("digits", [1, 3])
def test_a_total_is_exact_over_any_number_of_tokens(size: int, digits: int) -> None:
    for tokens in (random_digits(digits, 2, size, below=BASE), torch.full((digits, 2, size), BASE - 1.0)):
        planes = exact_sums.pad_tokens(tokens, 0.0)
        assert planes.shape[-1] % (256 if size <= 4096 else 4096) == 0 and planes.shape[-1] - size < 4096
        if digits == 1:  # one alone numbers few tokens
            planes = (planes > 0).float()
        found = exact_sums.sum_tokens(planes)
        expected = planes[..., :size].long().sum(-1).T.tolist()
        assert [value(each) for each in found.tolist()] == [value(each) for each in expected]
        assert found.shape == (2, digits + (digits > 1))


# Two digits are enough to tell whether one is carried to the next.
STEPS = FloatSteps(((32.0, 16), (1.0, 32)), ((2.0**12, 2**11), (1.0, 2**12)))
SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max


def found(number: float) -> float:
    """What is found to be the largest that is at most `number`."""

    def not_too_high(tried: Tensor) -> Tensor:
        assert (tried[:, 1:] >= tried[:, :-1]).all()
        return (tried <= number).float().sum(-1, keepdim=True)

    return float(largest_float(not_too_high, torch.zeros(1, 1), STEPS))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "size",
    [0.0, SMALLEST, 3 * SMALLEST, 2.0**-126 - SMALLEST, 2.0**-126, 1 - 2**-24, 1.0, 1 + 2**-23, LARGEST, math.inf],
)
def test_the_edges_of_each_kind_of_number_are_found(size: float, sign: int) -> None:
    assert found(sign * size) == sign * size


@examples(200)
@given(st.floats(width=32, allow_nan=False))
def test_any_number_is_found(number: float) -> None:
    assert found(number) == number
