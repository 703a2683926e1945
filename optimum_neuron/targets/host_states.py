# SPDX-License-Identifier: Apache-2.0
"""Executables with their states in this process's memory.

Keys and values, and keys by which a layer selects, belong to a token each, so the first ones of a slot can be copied. The other states
of a slot (of convolutions, recurrences and compressed keys) belong to all its tokens together: all of it is copied to a snapshot's
place, and from there to a slot that has the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..arrays import as_bits
from ..artifact.artifact import Artifact
from ..artifact.pages import touch
from ..artifact.weights import check_memory
from ..config import NeuronConfig
from ..step.model_spec import ModelSpec
from ..step.state_specs import kept_state_specs, slot_state_specs
from . import Executable


class HostStates(Executable):
    """An executable that copies, reads and writes states in this process's memory.

    Args:
        states: all of them by name, the buffers themselves.
        places: as `allocate_places` gives them; None where nothing copies states for later.
    """

    def __init__(self, states: Mapping[str, np.ndarray], places: Mapping[str, np.ndarray] | None = None) -> None:
        self._states, places = states, places or {}
        self._columns = [as_bits(state) for name, state in states.items() if name not in places]
        self._kept = [(as_bits(states[name]), as_bits(kept)) for name, kept in places.items()]

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        for state in self._columns:
            state[destination, :, :length] = state[source, :, :length]

    def keep_state(self, slot: int, place: int) -> None:
        for state, kept in self._kept:
            kept[place] = state[slot]

    def restore_state(self, place: int, slot: int) -> None:
        for state, kept in self._kept:
            state[slot] = kept[place]

    def read_state(self, name: str) -> np.ndarray:
        return self._states[name].copy()

    def write_state(self, name: str, array: np.ndarray) -> None:
        self._states[name][...] = array

    def touch_states(self) -> None:
        for memory in (*self._states.values(), *(kept for _, kept in self._kept)):
            touch(memory)


def allocate_places(config: NeuronConfig, model: ModelSpec) -> dict[str, np.ndarray]:
    """Return zeroed `[places, ...]` for snapshots, by the name of each state that a slot has as a whole."""
    kept = zip(slot_state_specs(config, model), kept_state_specs(config, model), strict=True)
    return {state.name: np.zeros(spec.shape, spec.dtype) for state, spec in kept}


def check_state_memory(artifact: Artifact) -> None:
    """Raise ValueError where all states of an artifact, and the places for their snapshots, are larger than this machine's memory."""
    check_memory((*artifact.states(), *artifact.kept_states()))
