# SPDX-License-Identifier: Apache-2.0
"""Snapshots: copies of what slots keep next to keys and values. The engine, or vLLM, decides what they are taken of."""

from __future__ import annotations

import numpy as np

from ..config import NeuronConfig
from ..step.model_spec import ModelSpec
from ..targets import Executable


class KeptStates:
    """Snapshots of what slots keep of all their tokens together: by place, the tokens of each; none where slots keep nothing."""

    def __init__(self, executable: Executable, config: NeuronConfig, model: ModelSpec | None) -> None:
        self._executable = executable
        self.needed = model is not None and not model.reuses_prefixes
        self.lengths = np.zeros(config.state_places if self.needed else 0, dtype=np.int32)

    def keep_copy(self, slot: int, length: int, place: int) -> None:
        """Copy a slot's state, of `length` tokens; raise ValueError for a place that does not exist, or an empty slot."""
        self._check_place(place)
        if not length:
            raise ValueError(f"slot {slot} holds no tokens, so it has no state to keep")
        self._executable.keep_state(slot, place)
        self.lengths[place] = length

    def check_copy(self, slot: int, length: int, place: int | None) -> None:
        """Raise ValueError where a slot cannot continue after `length` tokens with the snapshot of a place, or with none."""
        if not self.needed:
            if place is not None:
                raise ValueError(
                    f"slot {slot} keeps nothing that snapshot {place} could hold: this model has no such state"
                )
            return
        if place is None:
            raise ValueError(
                f"slot {slot} keeps state of all its tokens together: its first {length} cannot be reused without a snapshot of "
                f"them; name one, or reset the slot and compute them again"
            )
        self._check_place(place)
        if self.lengths[place] != length:
            raise ValueError(f"snapshot {place} holds {self.lengths[place]} tokens, and {length} are to be reused")

    def restore_copy(self, place: int, slot: int) -> None:
        """Copy a snapshot that `check_copy` allows to a slot."""
        self._executable.restore_state(place, slot)

    def _check_place(self, place: int) -> None:
        if not 0 <= place < len(self.lengths):
            raise ValueError(f"snapshot {place} does not exist: there are {len(self.lengths)}, from 0 on")
