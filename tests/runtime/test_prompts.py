# SPDX-License-Identifier: Apache-2.0
"""Prompts packed one behind another are taken apart, or refused where their bounds do not fit."""

from __future__ import annotations

import pytest
import torch
from helpers import VOCAB, random_tokens
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuron.runtime.prompts import unpack


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_packed_prompts_are_taken_apart(lengths: list[int]) -> None:
    prompts = [random_tokens(length, seed=length) for length in lengths]
    packed = torch.cat([torch.from_numpy(prompt) for prompt in prompts])[None].long()
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    assert [prompt.tolist() for prompt in unpack(packed, bounds, VOCAB)] == [prompt.tolist() for prompt in prompts]


@pytest.mark.parametrize("bounds", [[1, 5], [[0, 5]], [0], [0, 3, 3, 5], [0, 4, 3, 5], [0, 4], [0, 6]])
def test_bounds_that_do_not_fit_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match=r"must rise from 0.* packed row, and input_ids has shape \[1, 5\]"):
        unpack(torch.arange(5)[None], torch.tensor(bounds), VOCAB)
    with pytest.raises(ValueError, match="must rise from 0"):
        unpack(torch.arange(6).view(2, 3), torch.tensor([0, 6]), VOCAB)
