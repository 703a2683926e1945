# SPDX-License-Identifier: Apache-2.0
"""Which tokens' state each snapshot is of, as a runner knows it: how many. What decides about them is the engine, or vLLM."""

from __future__ import annotations

import numpy as np

from ..config import NeuronConfig
from ..step.model_spec import ModelSpec
from ..targets import Executable


class KeptStates:
    """Snapshots of what slots keep of all their tokens together.

    Attributes:
        needed: whether slots keep anything beside keys and values: then a prefix is taken over with a snapshot of as many tokens.
        lengths: `[places]`, tokens of each snapshot; 0 of an empty place.
    """

    def __init__(self, executable: Executable, config: NeuronConfig, model: ModelSpec | None) -> None:
        self._executable = executable
        self.needed = model is not None and not model.reuses_prefixes
        self.lengths = np.zeros(config.snapshot_places if self.needed else 0, dtype=np.int32)

    @property
    def places(self) -> int:
        return len(self.lengths)

    def keep(self, slot: int, length: int, place: int) -> None:
        """Copies a slot's state, of `length` tokens.

        Raises:
            ValueError: there is no such place, or the slot has no tokens.
        """
        self._check_place(place)
        if not length:
            raise ValueError(f"slot {slot} holds no tokens, so it has no state to keep")
        self._executable.keep_state(slot, place)
        self.lengths[place] = length

    def check(self, slot: int, length: int, place: int | None) -> None:
        """Raises ValueError where a slot cannot go on behind `length` tokens with what is in a place, or with none."""
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
            raise ValueError(f"snapshot {place} is of {self.lengths[place]} tokens, and {length} are to be reused")

    def restore(self, place: int | None, slot: int) -> None:
        """Copies what `check` found right."""
        if place is not None:
            self._executable.restore_state(place, slot)

    def _check_place(self, place: int) -> None:
        if not 0 <= place < self.places:
            raise ValueError(f"snapshot {place} does not exist: there are {self.places}, from 0 on")
