# SPDX-License-Identifier: Apache-2.0
"""Executables with their states in this process's memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..artifact.pages import touch
from ..step.slot_copies import SlotCopies
from . import Executable


class HostStates(Executable):
    """The part of an executable that copies, reads and writes states.

    Args:
        snapshots: as in `SlotCopies`.
    """

    def __init__(self, states: dict[str, Tensor], snapshots: Mapping[str, Tensor]) -> None:
        self._states, self._snapshots = states, snapshots
        self._copies = SlotCopies(states, snapshots)

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        self._copies.copy_columns(source, destination, length)

    def keep_state(self, slot: int, snapshot: int) -> None:
        self._copies.keep(slot, snapshot)

    def restore_state(self, snapshot: int, slot: int) -> None:
        self._copies.restore(snapshot, slot)

    def read_state(self, name: str) -> Tensor:
        return self._states[name].clone()

    def write_state(self, name: str, tensor: Tensor) -> None:
        self._states[name].copy_(tensor)

    def touch_states(self) -> None:
        for memory in (*self._states.values(), *self._snapshots.values()):
            touch(memory)
