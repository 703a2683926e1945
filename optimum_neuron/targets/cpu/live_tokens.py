# SPDX-License-Identifier: Apache-2.0
"""How many of a step's tokens a run of its graph has to compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...step.spec import GraphSpec


class LiveTokens:
    """Counts the tokens of a graph's inputs up to the last live one, decode rows before chunk rows.

    A token of a chunk is live where its position is larger than the one before, a decode row's where it has one.
    """

    def __init__(self, spec: GraphSpec) -> None:
        inputs = enumerate(spec.inputs())
        self._positions = [place for place, each in inputs if each.name.endswith(".position_ids")]
        self._views: dict[int, tuple[Tensor, np.ndarray, memoryview | None]] = {}

    def __call__(self, inputs: Sequence[Tensor]) -> int:
        """At least one of `GraphSpec.inputs`; all, where none is live: then a graph is run to warm up."""
        last = total = 0
        for place in self._positions:
            positions, rows = self._view(place, inputs[place])
            end = _end_of_chunks(positions) if rows is None else _end_of_rows(rows)
            last = total + end if end else last
            total += positions.size
        return last or total

    def _view(self, place: int, tensor: Tensor) -> tuple[np.ndarray, memoryview | None]:
        """As numpy has it, and of rows of one token as Python has it; a runner gives the same tensors in every step."""
        known = self._views.get(place)
        if known is None or known[0] is not tensor:
            positions = tensor.numpy()
            rows = positions.reshape(-1).data if positions.shape[1] == 1 else None
            known = self._views[place] = tensor, positions, rows
        return known[1:]


def _end_of_rows(positions: memoryview) -> int:
    """The place behind the last live one; 0 where none is."""
    end = len(positions)
    while end and positions[end - 1] < 0:
        end -= 1
    return end


def _end_of_chunks(positions: np.ndarray) -> int:
    live = positions >= 0
    live[:, 1:] &= positions[:, 1:] > positions[:, :-1]
    places = live.reshape(-1).nonzero()[0]
    return int(places[-1]) + 1 if len(places) else 0
