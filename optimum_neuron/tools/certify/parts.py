# SPDX-License-Identifier: Apache-2.0
"""Which part of a state each rank holds, by the plan by which the model is shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from ...step.model_spec import ModelSpec
from ...targets.neuron.graph_io import SNAPSHOTS, cut_dim
from ...targets.neuron.sharding.heads import PADDING, HeadLayout
from ...targets.neuron.sharding.plan import ShardPlan


# By state: of each rank, the head or channel in each of its places, or PADDING. Without those that every rank has whole.
StateParts = Mapping[str, tuple[tuple[int, ...], ...]]


def state_parts(plan: ShardPlan, spec: ModelSpec, model: nn.Module) -> StateParts:
    """By the plan of a model, whose layers have their numbers."""
    return dict(_heads(plan, spec, model)) | dict(_channels(plan, spec, model)) | dict(_recurrences(plan, spec, model))


def places_of(parts: StateParts | None, name: str, rank: int) -> tuple[int, ...] | None:
    """What a rank holds of a state, or of snapshots of it; None where that is all of it."""
    state = name.removeprefix(SNAPSHOTS)
    return None if parts is None or state not in parts else parts[state][rank]


def _heads(plan: ShardPlan, spec: ModelSpec, model: nn.Module) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    layouts: dict[int, HeadLayout] = {}
    for name, shared in plan.attention.items():
        layouts[cast(int, model.get_submodule(name).layer_idx)] = shared.layout
    for layer in spec.layers:
        if layer.layer_idx not in layouts:
            continue
        layout = layouts[layer.layer_idx]
        slots, count = layout.key_value, layout.local_key_value
        parts = tuple(slots[rank * count : (rank + 1) * count] for rank in range(plan.world_size))
        for role in ("key", "value", "keyscale", "valuescale"):
            yield f"kv_cache.{role}_{layer.layer_idx}", parts


def _channels(plan: ShardPlan, spec: ModelSpec, model: nn.Module) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    cut = {cast(int, model.get_submodule(name).layer_idx) for name in plan.convolutions}
    for state in spec.convolutions:
        if state.layer_idx not in cut:
            continue
        count = state.channels // plan.world_size
        parts = tuple(tuple(range(rank * count, (rank + 1) * count)) for rank in range(plan.world_size))
        yield f"kv_cache.conv_{state.layer_idx}_{state.index}", parts


def _recurrences(
    plan: ShardPlan, spec: ModelSpec, model: nn.Module
) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    cut = {cast(int, model.get_submodule(name).layer_idx): name for name in plan.recurrences}
    ranks = range(plan.world_size)
    for each in spec.convolutions:
        if each.layer_idx in cut:
            channels = [plan.channels(cut[each.layer_idx], each.index, rank) for rank in ranks]
            if None not in channels:
                yield f"kv_cache.conv_{each.layer_idx}_{each.index}", tuple(own for own in channels if own is not None)
    for state in spec.recurrences:
        if state.layer_idx in cut:
            shared = plan.recurrences[cut[state.layer_idx]]
            heads, inputs = (tuple(tuple(of(rank)) for rank in ranks) for of in (shared.heads_of, shared.inputs_of))
            number = f"{state.layer_idx}_{state.index}"
            yield from ((f"kv_cache.{role}_{number}", heads) for role in ("state", "anchor"))
            yield f"kv_cache.tail_{number}", inputs


def part(state: Tensor, places: tuple[int, ...] | None) -> Tensor:
    """A rank's part of a state, of heads or of channels; zeros where it holds padding. All of it without `places`."""
    if places is None:
        return state
    dim = cut_dim(state.shape)
    taken = state.index_select(dim, torch.tensor([max(place, 0) for place in places]))
    kept = torch.tensor([place != PADDING for place in places]).view(-1, *[1] * (state.dim() - 1 - dim))
    return torch.where(kept, taken, torch.zeros((), dtype=state.dtype))


def real_heads(places: tuple[int, ...] | None) -> list[int] | None:
    """The places of a rank that hold a head; None where all do."""
    if places is None or PADDING not in places:
        return None
    return [place for place, head in enumerate(places) if head != PADDING]
