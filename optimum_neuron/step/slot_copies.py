# SPDX-License-Identifier: Apache-2.0
"""Copies of what slots hold, made by the host where states lie in its memory: columns of one slot to another, and states as a whole.

Keys and values, and keys by which a layer selects, are of a token each, so the first ones of a slot can be copied. What a slot keeps beside
them (inputs of convolutions; of recurrences the state, its anchor, its tail and how many tokens came in chunks; compressed keys, and the
tokens that none is made of yet) is of all its tokens together: all of it is copied to a snapshot's place, and from there to a slot that
has the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import NeuronConfig
from .model_spec import ModelSpec
from .state_specs import slot_state_specs, snapshot_specs


class SlotCopies:
    """What is copied between the states of one artifact.

    Args:
        states: all of them by name, the buffers themselves.
        snapshots: by the name of a state that a slot has as a whole, `[places, ...]`, a row for each snapshot.
    """

    def __init__(self, states: Mapping[str, Tensor], snapshots: Mapping[str, Tensor]) -> None:
        self._columns = [state for name, state in states.items() if name not in snapshots]
        self._whole = [(states[name], kept) for name, kept in snapshots.items()]

    def copy_columns(self, source: int, destination: int, length: int) -> None:
        """The first `length` columns of one slot, or block, to another."""
        for state in self._columns:
            state[destination, :, :length] = state[source, :, :length]

    def keep(self, slot: int, place: int) -> None:
        """A slot's states to a snapshot's place."""
        for state, kept in self._whole:
            kept[place] = state[slot]

    def restore(self, place: int, slot: int) -> None:
        """A snapshot to a slot's states."""
        for state, kept in self._whole:
            state[slot] = kept[place]


def empty_snapshots(config: NeuronConfig, model: ModelSpec) -> dict[str, Tensor]:
    """Zeroed places for `SlotCopies`."""
    kept = zip(slot_state_specs(config, model), snapshot_specs(config, model), strict=True)
    return {state.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for state, spec in kept}
