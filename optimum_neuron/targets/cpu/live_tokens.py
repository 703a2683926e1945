# SPDX-License-Identifier: Apache-2.0
"""How many of a step's tokens a run of its graph has to compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...graphs.spec import GraphSpec


class LiveTokens:
    """Counts the tokens of a graph's inputs up to the last live one, decode rows before chunk rows.

    A token of a chunk is live where its position is larger than the one before, a decode row's where it has one.
    """

    def __init__(self, spec: GraphSpec) -> None:
        inputs = enumerate(spec.inputs())
        self._positions = [place for place, each in inputs if each.name.endswith(".position_ids")]
        self._views: dict[int, tuple[Tensor, np.ndarray]] = {}

    def __call__(self, inputs: Sequence[Tensor]) -> int:
        """At least one of `GraphSpec.inputs`; all, where none is live: then a graph is run to warm up."""
        last = total = 0
        for place in self._positions:
            positions = self._view(place, inputs[place])
            end = _end_of_rows(positions[:, 0].tolist()) if positions.shape[1] == 1 else _end_of_chunks(positions)
            last = total + end if end else last
            total += positions.size
        return last or total

    def _view(self, place: int, tensor: Tensor) -> np.ndarray:
        """As numpy has it; a runner gives the same tensors in every step."""
        known = self._views.get(place)
        if known is None or known[0] is not tensor:
            known = self._views[place] = tensor, tensor.numpy()
        return known[1]


def _end_of_rows(positions: list[int]) -> int:
    """The place behind the last live one; 0 where none is."""
    return next((place + 1 for place in range(len(positions) - 1, -1, -1) if positions[place] >= 0), 0)


def _end_of_chunks(positions: np.ndarray) -> int:
    live = positions >= 0
    live[:, 1:] &= positions[:, 1:] > positions[:, :-1]
    places = live.reshape(-1).nonzero()[0]
    return int(places[-1]) + 1 if len(places) else 0
