# SPDX-License-Identifier: Apache-2.0
"""What a run takes in: each tensor as it is at that time, whichever it is, and which of its tokens are live."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from helpers import examples, tiny_config
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuron.step.spec import graph_specs
from optimum_neuron.targets.cpu.executable import LiveTokens


VOCAB = 10
SPECS = {spec.kind: spec for spec in graph_specs(tiny_config(batch_size=4))}


@pytest.mark.parametrize("kind", SPECS)
def test_live_tokens_end_with_the_last_that_is_none_of_padding(kind: str) -> None:
    spec = SPECS[kind]  # type: ignore[index]
    counts = LiveTokens(spec)
    inputs = [np.zeros(each.shape, each.dtype) for each in spec.inputs()]
    positions = [tensor for each, tensor in zip(spec.inputs(), inputs, strict=True) if "position_ids" in each.name]

    @examples(60)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        live: list[bool] = []
        for rows in positions:
            for row in rows:
                live += _draw_row(data, row)
        last = max((place + 1 for place, each in enumerate(live) if each), default=len(live))
        assert counts(inputs) == last

    check()


def _draw_row(data: st.DataObject, row: np.ndarray) -> Sequence[bool]:
    """Fills a row: idle, or tokens that follow each other, the last one repeated."""
    count = data.draw(st.integers(0, len(row)))
    start = data.draw(st.integers(0, 3))
    row.fill(start + count - 1 if count else -1)
    row[:count] = np.arange(start, start + count)
    return [place < count for place in range(len(row))]
