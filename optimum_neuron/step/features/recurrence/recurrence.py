# SPDX-License-Identifier: Apache-2.0
"""Recurrences over the tokens of each slot.

transformers' layers call functions of their module by name. While a step runs these are ours (recurrent_functions.py). They make a
`ScanCall`, and `SlotScans` has an operator of the step (StepOps) compute it over the state of each token's own slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ....errors import UnsupportedModelError
from ...attention.kv_cache import KVCache
from ...attention.rows import StepLayout, actual_tokens_mask
from ...layer_state import StateRecorder
from ...serving import plain_index


# A member of StepOps each.
ScanKind = Literal["delta_rule", "state_space_scan", "selective_scan"]


@dataclass(frozen=True)
class ScanCall:
    """One layer's recurrence over all tokens of a step, padding included; everything is float32.

    Per head, with a state S `[key_dim, value_dim]`, a token makes of it:

        S <- exp(decay) * S                                                      "delta_rule", "state_space_scan"
        S <- exp(rates * decay) * S                                              "selective_scan"
        S <- S + key (beta * (value - S^T key))^T                                "delta_rule"
        S <- S + key value^T                                                     the others
        output = S^T query                                                       all

    Attributes:
        query, key: `[tokens, key_heads, key_dim]`, normalized and scaled; head h has those of h // (heads / key_heads).
        value: `[tokens, heads, value_dim]`.
        decay: `[tokens, heads]`, or `[tokens, heads, key_dim]` where each row of S has its own; at most 0. In a selective scan
            `[tokens, heads, value_dim]`, at least 0: each column's own, to be multiplied by its rates.
        beta: `[tokens, heads]`; None without the delta rule.
        rates: `[key_dim, value_dim]`, at most 0; None but for a selective scan.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor | None = None
    rates: Tensor | None = None

    @property
    def heads(self) -> int:
        return self.value.shape[1]

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the tensors `[tokens, ...]` that change the state: all but queries."""
        return tuple(each for each in (self.key, self.value, self.decay, self.beta) if each is not None)

    @property
    def width(self) -> int:
        return sum(each[0].numel() for each in self.inputs())

    def over_heads(self, states: Tensor) -> Tensor:
        groups, dim = states.shape[-2:]
        if groups == self.heads:
            return states
        each = states[..., None, :].expand(*states.shape[:-1], self.heads // groups, dim)
        return each.flatten(-3, -2)


@dataclass
class ScanRows:
    """The tokens of a step, for its recurrences.

    Decode rows come first, then chunk rows. The tokens of a slot are neighbors, in the order of their positions; rows of one prompt are
    full but for the last. A token at position 0 meets a state of zeros, whatever its slot holds.

    Attributes:
        slots: `[tokens]` int32; of padding and of idle rows, the one after the last slot.
        positions: `[tokens]` int32; of padding, anything.
        decode: `[R]` int32, the positions of decode rows, -1 where a row is idle; row i is slot i. None without decode rows.
        chunk: `[P, C]` int32, the positions of chunk rows; None without them. Padding repeats the last one, an idle row has -1.
        actual, chunk_slots: `[P, C]`, the tokens among these, and `[P]` int32.
        scanned: `[slots + 1]` int32, how many tokens of each slot came in chunks; None where the target walks.
        grids: the grid of this step for each block size.
    """

    slots: Tensor
    positions: Tensor
    decode: Tensor | None
    chunk: Tensor | None
    actual: Tensor | None
    chunk_slots: Tensor | None
    scanned: Tensor | None = None
    grids: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def from_layout(cls, step: StepLayout) -> ScanRows:
        decode = next((group.position_ids[:, 0] for group in step.groups if group.decodes), None)
        chunk: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        for group in step.groups:
            if not group.decodes:
                chunk = group.position_ids, actual_tokens_mask(group.position_ids), group.slots
        return cls(*step.slot_places, decode, *chunk, step.cache.find_state("scanned"))


@dataclass(frozen=True)
class ScanState:
    """The state of slots for one recurrence: float32 buffers, changed in place. The last row takes padding.

    Attributes:
        current: `[slots + 1, heads, key_dim, value_dim]`, after the last token of each slot.
        anchor: the same after the last whole block of each slot; None where the target walks token by token.
        tail: `[slots + 1, block, width]`, the inputs of the tokens since, at their places in the block; None as `anchor` is.
    """

    current: Tensor
    anchor: Tensor | None = None
    tail: Tensor | None = None


# From a call, the step's rows and the layer's state, which it takes on in place, to `[tokens, heads, value_dim]` float32.
# Results of padding and of idle rows are never read.
Scan = Callable[[ScanCall, ScanRows, ScanState], Tensor]


@dataclass
class RecurrenceBackend(ABC):
    """A backend that computes recurrences, numbered by layer and within it; `layer_idx` is the layer that asked its cache last."""

    layer_idx: int | None = field(default=None, init=False)
    _counts: dict[int, int] = field(default_factory=dict, init=False)

    @abstractmethod
    def scan(self, kind: ScanKind, call: ScanCall) -> Tensor:
        """Return `[tokens, heads, value_dim]` float32."""

    def enter_layer(self, layer_idx: Any) -> None:
        self.layer_idx = plain_index(layer_idx)

    def leave_layer(self, layer_idx: Any) -> None:
        """Check that a layer hands over the state of a recurrence that was computed here."""
        number = plain_index(layer_idx)
        if number != self.layer_idx or not self._counts.get(number):
            raise UnsupportedModelError(f"layer {number} keeps the state of a recurrence of its own")

    def number_scan(self) -> tuple[int, int]:
        if self.layer_idx is None:
            raise UnsupportedModelError("it computes a recurrence in a layer that does not ask its cache for anything")
        index = self._counts.get(self.layer_idx, 0)
        self._counts[self.layer_idx] = index + 1
        return self.layer_idx, index


@dataclass
class SlotScans(RecurrenceBackend):
    """The recurrence backend of step graphs, by the operators of `ops`, a `StepOps`."""

    cache: KVCache
    rows: ScanRows
    ops: Any

    @classmethod
    def for_step(cls, step: StepLayout) -> SlotScans:
        return cls(step.cache, ScanRows.from_layout(step), step.ops)

    def scan(self, kind: ScanKind, call: ScanCall) -> Tensor:
        number = self.number_scan()
        anchor, tail = (self.cache.find_state(role, *number) for role in ("anchor", "tail"))
        scan: Scan = getattr(self.ops, kind)
        return scan(call, self.rows, ScanState(self.cache.get_state("state", *number), anchor, tail))


@dataclass
class RecurrenceRecorder(StateRecorder, RecurrenceBackend):
    def scan(self, kind: ScanKind, call: ScanCall) -> Tensor:
        sizes = call.heads, call.key.shape[2], call.value.shape[2], call.width
        self.add_state("a recurrence twice", *self.number_scan(), *sizes)
        return torch.zeros_like(call.value)
