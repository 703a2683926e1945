# SPDX-License-Identifier: Apache-2.0
"""Sums of whole numbers in float32 digits are those of Python's integers, and a search over float32 finds each number, to the bit."""

from __future__ import annotations

import itertools
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


def test_a_number_has_one_float_whatever_its_digits_hold() -> None:
    digits = torch.cat([random_digits(200, 3, below=2**24), torch.tensor([[0.0, 0.0, 5.0], [0.0, 0.0, 5000.0]])])
    numbers = [value(each) for each in digits.tolist()]
    canonical = [[number // BASE**2, number // BASE % BASE, number % BASE] for number in numbers]
    found = exact_sums.to_float(digits)
    assert torch.equal(found, exact_sums.to_float(torch.tensor(canonical, dtype=torch.float32)))
    assert all(abs(one - number) <= number * 2.0**-23 for one, number in zip(found.tolist(), numbers, strict=True))
    assert found[-2:].tolist() == [5.0, 5000.0]


def test_widened_digits_are_the_same_number_and_leave_room() -> None:
    digits = torch.cat([random_digits(50, 3, below=2**24), torch.full((1, 3), 2.0**24 - 1)])
    found = exact_sums.widen_digits(digits)
    assert [value(each) for each in found.tolist()] == [value(each) for each in digits.tolist()]
    assert found.shape[-1] == 4 and bool((found < 2 * BASE).all())


def test_numbers_are_compared_whatever_their_digits_hold() -> None:
    some = torch.cat([random_digits(20, 3, below=2**24), random_digits(20, 3, below=3), torch.zeros(1, 3)])
    some = torch.cat([some, some + torch.tensor([0.0, 0.0, 1.0]), some + torch.tensor([0.0, -1.0, BASE])])
    some = some[(some >= 0).all(-1)]
    for left, right in itertools.product(some, some):
        expected = value(left.tolist()) < value(right.tolist())
        assert bool(exact_sums.is_less(left, right)) is expected


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


def test_padding_is_what_was_asked_for() -> None:
    assert exact_sums.pad_tokens(torch.zeros(2, 300), 7.0)[:, 300:].tolist() == [[7.0] * 212] * 2


@pytest.mark.parametrize("parts", [1, 2, 16])
def test_the_part_that_reaches_beyond_a_target_is_picked(parts: int) -> None:
    sums = random_digits(4, parts, 3, below=BASE)
    sums[1, ::3] = 0.0  # of nothing, the last part excepted
    sums[:, -1, 0] = 1.0
    base = random_digits(4, 3, below=BASE, seed=1)
    for row, part, offset in itertools.product(range(4), range(parts), (0, -1, 1)):
        starts = list(itertools.accumulate(map(value, sums[row].tolist()), initial=value(base[row].tolist())))
        wanted = starts[part] + offset
        if not starts[0] <= wanted < starts[-1]:
            continue
        target = torch.tensor([wanted // BASE**2, wanted // BASE % BASE, wanted % BASE], dtype=torch.float32)
        index, before = exact_sums.pick_part(sums[row, None], base[row, None], target[None])
        expected = max(place for place in range(parts) if starts[place] <= wanted)
        assert int(index) == expected
        assert value(before[0].tolist()) == starts[expected]


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
