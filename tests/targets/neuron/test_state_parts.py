# SPDX-License-Identifier: Apache-2.0
"""What each rank holds of the state of a cache: heads of keys and values, channels of convolutions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optimum_neuron.targets.neuron.run.load_plan import join_states, split_state
from optimum_neuron.targets.neuron.sharding.rules import PADDING
from optimum_neuron.tools.certify.reference import real_heads, take_part


@pytest.mark.parametrize(("shape", "dim"), [((3, 4, 5, 2), 1), ((3, 2, 4), 2)])
def test_the_parts_of_a_state_are_its_heads_or_its_channels(shape: tuple[int, ...], dim: int) -> None:
    state = torch.randn(shape)
    parts = [torch.from_numpy(each) for each in split_state(state.numpy(), 2)]
    assert [each.shape[dim] for each in parts] == [2, 2]
    assert np.array_equal(join_states([each.numpy() for each in parts]), state)
    for rank, own in enumerate(parts):
        assert torch.equal(take_part(state, (2 * rank, 2 * rank + 1)), own)
    padded = take_part(state, (3, PADDING))
    assert torch.equal(padded.select(dim, 0), state.select(dim, 3)) and not padded.select(dim, 1).any()
    assert real_heads((3, PADDING)) == [0] and real_heads((3, 2)) is None
    with pytest.raises(ValueError, match="a state of 4 heads or channels is not that of 3 ranks"):
        split_state(state.numpy(), 3)
