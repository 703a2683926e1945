# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities are torch's."""

from __future__ import annotations

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from optimum_neuron.step.sampling.logprobs import Logprobs, logprobs


NOISE = 4e-6  # of sums of up to 500 exponentials in float32, in another order


def check(found: Logprobs, logits: Tensor, chosen: Tensor, count: int) -> None:
    expected = logits.double().log_softmax(-1)
    own = expected.gather(-1, chosen[:, None].long())
    torch.testing.assert_close(found.chosen.double(), own[:, 0], atol=NOISE, rtol=1e-6)
    kept = logits.gather(-1, chosen[:, None].long())
    assert torch.equal(found.ranks, (logits >= kept).sum(-1).int())
    # Of equal logits the lower token first, which a stable sort has too.
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(found.tokens.long(), order)
    torch.testing.assert_close(found.best.double(), expected.gather(-1, order), atol=NOISE, rtol=1e-6)


@examples(40)
@given(
    seed=st.integers(0, 1000),
    vocab=st.integers(20, 500),
    count=st.integers(0, 20),
    coarse=st.booleans(),
    data=st.data(),
)
def test_they_are_those_of_a_softmax(seed: int, vocab: int, count: int, coarse: bool, data: st.DataObject) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)) * 8 - 30
    if coarse:  # with ties
        logits = logits.round()
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, vocab - 1), min_size=3, max_size=3)), dtype=torch.int32)
    check(logprobs(logits, chosen, count), logits, chosen, count)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, 1e30])
def test_logits_of_any_size_give_numbers(scale: float) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * scale
    found = logprobs(logits, logits.argmin(-1).int(), 5)
    assert found.ranks.tolist() == [300] * 4
    assert all(each.isfinite().all() for each in (found.chosen, found.best))
    torch.testing.assert_close(found.best, logits.log_softmax(-1).topk(5).values)
