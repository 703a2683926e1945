# SPDX-License-Identifier: Apache-2.0
"""How many bytes state takes: all of it, and of one request, by token and by slot whatever its length. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .spec import TensorSpec


# States that have a place for each token, `[blocks, heads, block_length, dim]`; all others have a row for each slot.
BY_TOKEN = tuple(f"kv_cache.{role}_" for role in ("key", "value", "keyscale", "valuescale", "index"))
# The types of state tensors.
_ITEM_SIZES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


def byte_count(states: Iterable[TensorSpec]) -> int:
    """Memory that states take."""
    return sum(map(_size, states))


@dataclass(frozen=True)
class StateSizes:
    """Bytes, of all layers together.

    Attributes:
        per_token: keys, values, their scales where they are codes, and index keys of a token.
        per_slot: inputs of convolutions, states of recurrences and compressed keys, as large for a short text as for a long one.
    """

    per_token: int
    per_slot: int

    @classmethod
    def of(cls, states: Iterable[TensorSpec]) -> StateSizes:
        """Args: states: those of `state_specs`."""
        per_token = per_slot = 0
        for state in states:
            size = _size(state)
            if state.name.startswith(BY_TOKEN):
                per_token += size // (state.shape[0] * state.shape[2])
            else:
                per_slot += size // state.shape[0]
        return cls(per_token, per_slot)


def _size(state: TensorSpec) -> int:
    return math.prod(state.shape) * _ITEM_SIZES[state.dtype]
