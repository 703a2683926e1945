# SPDX-License-Identifier: Apache-2.0
"""How many of a step's tokens a run of its graph has to compute."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...graphs.spec import GraphSpec


class LiveTokens:
    """Counts the tokens of a graph's inputs up to the last live one, decode rows before chunk rows.

    A token of a chunk is live where its position is larger than the one before, a decode row's where it has one.
    """

    def __init__(self, spec: GraphSpec) -> None:
        inputs = enumerate(spec.inputs())
        self._positions = [place for place, each in inputs if each.name.endswith(".position_ids")]

    def __call__(self, inputs: Sequence[Tensor]) -> int:
        """At least one of `GraphSpec.inputs`; all, where none is live: then a graph is run to warm up."""
        last = total = 0
        for place in self._positions:
            positions = inputs[place].numpy()
            live = positions >= 0
            live[:, 1:] &= positions[:, 1:] > positions[:, :-1]
            places = live.reshape(-1).nonzero()[0]
            last = total + int(places[-1]) + 1 if len(places) else last
            total += positions.size
        return last or total
