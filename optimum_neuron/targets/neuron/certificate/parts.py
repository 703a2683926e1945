# SPDX-License-Identifier: Apache-2.0
"""Which heads of a state each rank holds, by the plan by which the model is shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from ....graphs.spec import ModelSpec
from ..sharding.heads import PADDING, HeadLayout
from ..sharding.plan import ShardPlan


# By state: of each rank, the head in each of its slots, or PADDING.
Heads = Mapping[str, tuple[tuple[int, ...], ...]]


def state_heads(plan: ShardPlan, spec: ModelSpec, model: nn.Module) -> Heads:
    """By the plan of a model, whose attention layers have their numbers; a layer that is not cut is on every rank whole."""
    layouts: dict[int, HeadLayout] = {}
    for name, shared in plan.attention.items():
        layouts[cast(int, model.get_submodule(name).layer_idx)] = shared.layout
    heads: dict[str, tuple[tuple[int, ...], ...]] = {}
    for layer in spec.layers:
        parts = (tuple(range(layer.kv_heads)),) * plan.world_size
        if layer.layer_idx in layouts:
            layout = layouts[layer.layer_idx]
            slots, count = layout.key_value, layout.local_key_value
            parts = tuple(slots[rank * count : (rank + 1) * count] for rank in range(plan.world_size))
        heads |= {f"kv_cache.{role}_{layer.layer_idx}": parts for role in ("key", "value")}
    return heads


def part(state: Tensor, heads: tuple[int, ...]) -> Tensor:
    """A rank's part of a state `[slots, heads, columns, dim]`; heads of zeros where it holds padding."""
    taken = state[:, [max(head, 0) for head in heads]]
    kept = torch.tensor([head != PADDING for head in heads])[:, None, None]
    return torch.where(kept, taken, torch.zeros((), dtype=state.dtype))


def real_heads(heads: tuple[int, ...]) -> list[int]:
    """The slots of a rank that hold a head."""
    return [slot for slot, head in enumerate(heads) if head != PADDING]
