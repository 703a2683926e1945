# SPDX-License-Identifier: Apache-2.0
"""The search over the numbers of float32 finds each of them, to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from optimum_neuron.step.sampling.float_search import FloatSteps, largest_float


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
