# SPDX-License-Identifier: Apache-2.0
"""Executables with their states in this process's memory.

Keys and values, and keys by which a layer selects, belong to a token each, so the first ones of a slot can be copied. The other states
of a slot (of convolutions, recurrences and compressed keys) belong to all its tokens together: all of it is copied to a snapshot's
place, and from there to a slot that has the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..artifact.pages import touch
from ..config import NeuronConfig
from ..step.model_spec import ModelSpec
from ..step.state_specs import slot_state_specs, snapshot_specs
from . import Executable


class HostStates(Executable):
    """An executable that copies, reads and writes states in this process's memory.

    Args:
        states: all of them by name, the buffers themselves.
        snapshots: by the name of a state that a slot has as a whole, `[places, ...]`, a row for each snapshot.
    """

    def __init__(self, states: dict[str, Tensor], snapshots: Mapping[str, Tensor]) -> None:
        self._states, self._snapshots = states, snapshots
        self._columns = [state for name, state in states.items() if name not in snapshots]

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        for state in self._columns:
            state[destination, :, :length] = state[source, :, :length]

    def keep_state(self, slot: int, snapshot: int) -> None:
        for name, kept in self._snapshots.items():
            kept[snapshot] = self._states[name][slot]

    def restore_state(self, snapshot: int, slot: int) -> None:
        for name, kept in self._snapshots.items():
            self._states[name][slot] = kept[snapshot]

    def read_state(self, name: str) -> Tensor:
        return self._states[name].clone()

    def write_state(self, name: str, tensor: Tensor) -> None:
        self._states[name].copy_(tensor)

    def touch_states(self) -> None:
        for memory in (*self._states.values(), *self._snapshots.values()):
            touch(memory)


def empty_snapshots(config: NeuronConfig, model: ModelSpec) -> dict[str, Tensor]:
    """Return zeroed places for the snapshots of an artifact."""
    kept = zip(slot_state_specs(config, model), snapshot_specs(config, model), strict=True)
    return {state.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for state, spec in kept}
