# SPDX-License-Identifier: Apache-2.0
"""The state tensors of one model's graphs: their names, shapes and types, in their order, and their size in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..config import NeuronConfig
from .model_spec import KINDS, ModelSpec
from .spec import TensorSpec


# Beginnings of the names of states with a place for each token, `[blocks, heads, block_length, dim]`. All others have a row for each slot.
BY_TOKEN = tuple(f"kv_cache.{role}_" for kind in KINDS if kind.by_token for role in kind.roles)
# The beginning of the names of places for copies of slots' states.
KEPT = "snapshots."
_ITEM_SIZES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


def state_specs(config: NeuronConfig, model: ModelSpec) -> tuple[TensorSpec, ...]:
    """Return all state tensors: those with a place for each token, then those of slots. Each kind documents its own."""
    return (*_list_tensors(config, model, by_token=True), *slot_state_specs(config, model))


def slot_state_specs(config: NeuronConfig, model: ModelSpec) -> tuple[TensorSpec, ...]:
    """Return the states of all tokens of a slot together: a row for each slot, then rows that take padding."""
    return tuple(_list_tensors(config, model, by_token=False))


def kept_state_specs(config: NeuronConfig, model: ModelSpec) -> tuple[TensorSpec, ...]:
    """Return places for copies of `slot_state_specs`, in their order: `[state_places, ...]`. No step graph has them."""
    places = config.state_places
    return tuple(
        TensorSpec(KEPT + state.name, (places, *state.shape[1:]), state.dtype)
        for state in slot_state_specs(config, model)
    )


def kept_states(config: NeuronConfig, model: ModelSpec) -> tuple[TensorSpec, ...]:
    return (*state_specs(config, model), *(kept_state_specs(config, model) if config.state_places else ()))


def _list_tensors(config: NeuronConfig, model: ModelSpec, *, by_token: bool) -> Iterator[TensorSpec]:
    for kind in KINDS:
        states = model.states_of(kind)
        if states and kind.by_token == by_token:
            for state in states:
                yield from state.list_tensors(config)
            yield from kind.list_common_tensors(config)


def byte_count(states: Iterable[TensorSpec]) -> int:
    return sum(map(_measure_state, states))


@dataclass(frozen=True)
class StateSizes:
    """The bytes of all layers together for a token, and for a slot, whatever the length of its text."""

    per_token: int
    per_slot: int

    @classmethod
    def measure(cls, states: Iterable[TensorSpec]) -> StateSizes:
        per_token = per_slot = 0
        for state in states:
            size = _measure_state(state)
            if state.name.startswith(BY_TOKEN):
                per_token += size // (state.shape[0] * state.shape[2])
            else:
                per_slot += size // state.shape[0]
        return cls(per_token, per_slot)


def _measure_state(state: TensorSpec) -> int:
    return math.prod(state.shape) * _ITEM_SIZES[state.dtype]
