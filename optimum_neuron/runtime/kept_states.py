# SPDX-License-Identifier: Apache-2.0
"""The length of each snapshot, as a runner knows it. The engine, or vLLM, decides what they are taken of."""

from __future__ import annotations

import numpy as np

from ..config import NeuronConfig
from ..step.model_spec import ModelSpec
from ..targets import Executable


class KeptStates:
    """Snapshots of what slots keep of all their tokens together.

    Attributes:
        needed: whether slots keep anything next to keys and values: then a prefix needs a snapshot of as many tokens.
        lengths: `[places]`, tokens of each snapshot; 0 of an empty place.
    """

    def __init__(self, executable: Executable, config: NeuronConfig, model: ModelSpec | None) -> None:
        self._executable = executable
        self.needed = model is not None and not model.reuses_prefixes
        self.lengths = np.zeros(config.state_places if self.needed else 0, dtype=np.int32)

    def keep_snapshot(self, slot: int, length: int, place: int) -> None:
        """Copy a slot's state, of `length` tokens.

        Raises:
            ValueError: there is no such place, or the slot has no tokens.
        """
        self._check_place(place)
        if not length:
            raise ValueError(f"slot {slot} holds no tokens, so it has no state to keep")
        self._executable.keep_state(slot, place)
        self.lengths[place] = length

    def check_snapshot(self, slot: int, length: int, place: int | None) -> None:
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

    def restore_snapshot(self, place: int | None, slot: int) -> None:
        """Copy a snapshot that `check_snapshot` allows to a slot."""
        if place is not None:
            self._executable.restore_state(place, slot)

    def _check_place(self, place: int) -> None:
        if not 0 <= place < len(self.lengths):
            raise ValueError(f"snapshot {place} does not exist: there are {len(self.lengths)}, from 0 on")
