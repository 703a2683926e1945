# SPDX-License-Identifier: Apache-2.0
"""Executables of lowered graphs: each step is started, then read, and graphs of their own copy what slots hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from torch import Tensor

from ... import Executable
from ..graph_io import COPY_SLOT, KEEP_STATE, RESTORE_STATE
from .load_plan import copy_inputs


class AheadExecutable(Executable):
    """The part of an executable that follows from `start`.

    Args:
        graphs: their names; a model without such state has none that copies it.
    """

    runs_ahead = True

    def __init__(self, graphs: Collection[str]) -> None:
        self._names = graphs

    def run(self, graph: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return cast(Sequence[Tensor], self.start(graph, inputs, logits=True)())

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        self._copy(COPY_SLOT, source, destination, length)

    def keep_state(self, slot: int, snapshot: int) -> None:
        self._copy(KEEP_STATE, slot, snapshot, 1)

    def restore_state(self, snapshot: int, slot: int) -> None:
        self._copy(RESTORE_STATE, snapshot, slot, 1)

    def _copy(self, graph: str, source: int, destination: int, length: int) -> None:
        if graph in self._names:
            self.run(graph, copy_inputs(source, destination, length))
