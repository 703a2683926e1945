# SPDX-License-Identifier: Apache-2.0
"""The graphs that copy what slots hold on the device: columns from slot to slot, and state as a whole to snapshots and back."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import NeuronConfig
from ...step.model_spec import ModelSpec
from ...step.spec import TensorSpec
from ...step.state_sizes import BY_TOKEN
from ...step.state_specs import slot_state_specs, snapshot_specs, state_specs
from .graph_io import COPY_SLOT, KEEP_STATE, RESTORE_STATE


# Which rows, and how much of one: tokens, or of a row that is copied as a whole any number; 0 copies nothing.
COPY_INPUTS = tuple(TensorSpec(f"copy.{name}", (1,), "int32") for name in ("source", "destination", "length"))


@dataclass(frozen=True)
class CopyGraph:
    """A graph that copies rows of states.

    Attributes:
        updated: the states whose rows are written.
        read: in the same order, those whose rows they are, where they are others; no graph returns these.
    """

    name: str
    updated: tuple[TensorSpec, ...]
    read: tuple[TensorSpec, ...] = ()

    @property
    def states(self) -> tuple[TensorSpec, ...]:
        return (*self.read, *self.updated)


def snapshot_states(config: NeuronConfig, model: ModelSpec) -> tuple[TensorSpec, ...]:
    """Where devices keep copies of slots' states; none where there are no places, as no device takes empty tensors."""
    return snapshot_specs(config, model) if config.snapshot_places else ()


def copy_graphs(config: NeuronConfig, model: ModelSpec) -> tuple[CopyGraph, ...]:
    """Those of an artifact, in the order in which they are lowered: none where no prefix can be reused, or nothing is to be copied.

    Args:
        model: or a rank's part of it; the states are then those of a rank.
    """
    snapshots = snapshot_states(config, model)
    columns = tuple(each for each in state_specs(config, model) if each.name.startswith(BY_TOKEN))
    graphs = []
    if config.kv_blocks > 1 and columns and (model.reuses_prefixes or config.snapshot_places):
        graphs.append(CopyGraph(COPY_SLOT, columns))
    if snapshots:
        states = slot_state_specs(config, model)
        graphs += [CopyGraph(KEEP_STATE, snapshots, states), CopyGraph(RESTORE_STATE, states, snapshots)]
    return tuple(graphs)
