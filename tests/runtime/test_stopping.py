# SPDX-License-Identifier: Apache-2.0
"""Rows end where transformers' criteria say so, whoever computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from optimum_neuron.runtime.generation import Stopping


class _EvenSum(StoppingCriteria):
    """Of a user: looks at all tokens, and at the scores where there are some."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        assert scores is None or all(each.shape[0] == input_ids.shape[0] for each in scores)
        return input_ids.sum(-1) % 2 == 0


class _LastIsOne(EosTokenCriteria):
    """A subclass says for itself what it does."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids[:, -1] == 1


CRITERIA = st.lists(
    st.one_of(
        st.builds(EosTokenCriteria, st.lists(st.integers(0, 5), min_size=1, max_size=3)),
        st.builds(MaxLengthCriteria, st.integers(1, 6)),
        st.builds(_EvenSum),
        st.builds(_LastIsOne, st.just([0])),
    ),
    max_size=4,
)


@examples(400)
@given(CRITERIA, st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32), st.booleans())
def test_rows_end_as_transformers_criteria_say(
    criteria: list[StoppingCriteria], rows: int, length: int, seed: int, scored: bool
) -> None:
    sequences = torch.randint(0, 6, (rows, 6), generator=torch.Generator().manual_seed(seed))
    scores = (torch.zeros(rows, 6),) if scored else None
    expected = StoppingCriteriaList(criteria)(sequences[:, :length], scores).tolist()
    tokens = sequences[:, length - 1].tolist()
    assert Stopping(StoppingCriteriaList(criteria)).find_ended(sequences, length, tokens, scores) == expected


@pytest.mark.parametrize("value", [True, torch.tensor([True, False])])
def test_a_criterion_may_answer_for_all_rows_at_once(value: bool | Tensor) -> None:
    stopping = Stopping(StoppingCriteriaList([lambda input_ids, scores: value]))
    assert stopping.find_ended(torch.zeros(2, 3), 3, [0, 0], None) == [True, value is True]
