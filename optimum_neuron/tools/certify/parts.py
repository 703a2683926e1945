# SPDX-License-Identifier: Apache-2.0
"""The part of each state that a rank holds, by the plan that shards the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from ...step.attention.state import KeyValueState
from ...step.features.convolution.state import ConvolutionState
from ...step.features.recurrence.state import RecurrentState
from ...step.model_spec import ModelSpec
from ...targets.neuron.graphs.io import SNAPSHOTS, cut_dim
from ...targets.neuron.sharding.plan import ShardPlan
from ...targets.neuron.sharding.rules import PADDING


# By state and rank, the head or channel in each of the rank's places, or PADDING. States that every rank has whole are missing.
StateParts = Mapping[str, tuple[tuple[int, ...], ...]]


def state_parts(plan: ShardPlan, spec: ModelSpec, model: nn.Module) -> StateParts:
    """Return the parts by the plan of a model with numbered layers."""
    return dict(_head_parts(plan, spec, model)) | dict(_recurrence_parts(plan, spec, model))


def places_of(parts: StateParts | None, name: str, rank: int) -> tuple[int, ...] | None:
    """Return the rank's places of a state, or of snapshots of it; None where it has all of it."""
    state = name.removeprefix(SNAPSHOTS)
    return None if parts is None or state not in parts else parts[state][rank]


def _layer_numbers(names: Mapping[str, object] | set[str], model: nn.Module) -> dict[int, str]:
    return {cast(int, model.get_submodule(name).layer_idx): name for name in names}


def _head_parts(
    plan: ShardPlan, spec: ModelSpec, model: nn.Module
) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    shared = _layer_numbers(plan.attention, model)
    for layer in spec.states_of(KeyValueState):
        if layer.layer_idx not in shared:
            continue
        layout = plan.attention[shared[layer.layer_idx]].layout
        slots, count = layout.key_value, layout.local_key_value
        parts = tuple(slots[rank * count : (rank + 1) * count] for rank in range(plan.world_size))
        for role in ("key", "value", "keyscale", "valuescale"):
            yield f"kv_cache.{role}_{layer.layer_idx}", parts


def _recurrence_parts(
    plan: ShardPlan, spec: ModelSpec, model: nn.Module
) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Yield the parts of convolutions, which are equal or follow their recurrence's heads, and of recurrences."""
    ranks = range(plan.world_size)
    convolutions, recurrences = (_layer_numbers(each, model) for each in (set(plan.convolutions), plan.recurrences))
    for each in spec.states_of(ConvolutionState):
        name, layer = f"kv_cache.conv_{each.layer_idx}_{each.index}", recurrences.get(each.layer_idx)
        channels = [None if layer is None else plan.channels(layer, each.index, rank) for rank in ranks]
        if None not in channels:
            yield name, tuple(own for own in channels if own is not None)
        elif each.layer_idx in convolutions:
            count = each.channels // plan.world_size
            yield name, tuple(tuple(range(rank * count, (rank + 1) * count)) for rank in ranks)
    for state in spec.states_of(RecurrentState):
        if state.layer_idx in recurrences:
            shared = plan.recurrences[recurrences[state.layer_idx]]
            heads, inputs = (tuple(tuple(of(rank)) for rank in ranks) for of in (shared.heads_of, shared.inputs_of))
            number = f"{state.layer_idx}_{state.index}"
            yield from ((f"kv_cache.{role}_{number}", heads) for role in ("state", "anchor"))
            yield f"kv_cache.tail_{number}", inputs


def take_part(state: Tensor, places: tuple[int, ...] | None) -> Tensor:
    """Return a rank's heads or channels of a state, zeros where it holds padding; all of it without `places`."""
    if places is None:
        return state
    dim = cut_dim(state.shape)
    taken = state.index_select(dim, torch.tensor([max(place, 0) for place in places]))
    kept = torch.tensor([place != PADDING for place in places]).view(-1, *[1] * (state.dim() - 1 - dim))
    return torch.where(kept, taken, torch.zeros((), dtype=state.dtype))


def real_heads(places: tuple[int, ...] | None) -> list[int] | None:
    """Return the places of a rank that hold a head; None where all do."""
    if places is None or PADDING not in places:
        return None
    return [place for place, head in enumerate(places) if head != PADDING]
