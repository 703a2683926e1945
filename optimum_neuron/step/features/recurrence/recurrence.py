# SPDX-License-Identifier: Apache-2.0
"""Recurrences over the tokens of each slot, whose state a slot keeps from step to step, in float32.

transformers' layers call functions of their module by name. While a step runs these are ours (recurrent_functions.py): they make
a `ScanCall` of what they are given, and `SlotScans` has an operator of the step (StepOps) compute it over the state of each
token's own slot. What the layer hands to its cache afterwards is a mark that this was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from torch import Tensor

from ...kv_cache import KVCache
from ...masks import UnsupportedModelError
from ...model_spec import RecurrentState
from ...tracing.layer_index import plain_index
from ..convolution.convolution import ConvolutionBackend


# A member of StepOps each.
ScanKind = Literal["delta_rule", "state_space_scan", "selective_scan"]
SCAN_KINDS: tuple[ScanKind, ...] = get_args(ScanKind)


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
        decay: `[tokens, heads]`, or `[tokens, heads, key_dim]` where each row of S has its own; at most 0. Of a selective scan
            `[tokens, heads, value_dim]`, at least 0: each column's own, to be multiplied by its rates.
        beta: `[tokens, heads]`; None for a scan without the delta rule.
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
        """What of a token changes the state: all but its query, each `[tokens, ...]`."""
        return (self.key, self.value, self.decay) + (() if self.beta is None else (self.beta,))

    @property
    def width(self) -> int:
        """How many numbers of a token `inputs` are."""
        return sum(each[0].numel() for each in self.inputs())

    def over_heads(self, states: Tensor) -> Tensor:
        """Queries or keys of `[..., key_heads, key_dim]` for each head."""
        groups, dim = states.shape[-2:]
        if groups == self.heads:
            return states
        each = states[..., None, :].expand(*states.shape[:-1], self.heads // groups, dim)
        return each.flatten(-3, -2)


@dataclass
class ScanRows:
    """Whose tokens a step has, for its recurrences.

    Decode rows come first, then chunk rows. The tokens of a slot stand side by side, in the order of their positions; rows of
    one prompt are full but for the last.

    Attributes:
        slots: `[tokens]` int32, the slot of each token; of padding and of idle rows, the one behind the last slot.
        positions: `[tokens]` int32, the position of each token; where there is none, anything. A token at position 0 meets a state
            of zeros, whatever its slot holds.
        decode: `[R]` int32, the positions of decode rows, -1 where a row is idle; row i is slot i. None without decode rows.
        chunk: `[P, C]` int32, the positions of chunk rows; None without them. Padding repeats the last one, an idle row has -1.
        actual: `[P, C]`, which of these are tokens.
        chunk_slots: `[P]` int32.
        scanned: `[slots + 1]` int32, the state in which a grid keeps how many tokens of each slot came in chunks; None where the
            target walks.
        grids: what follows from all this for blocks of a size, made once per step.
    """

    slots: Tensor
    positions: Tensor
    decode: Tensor | None
    chunk: Tensor | None
    actual: Tensor | None
    chunk_slots: Tensor | None
    scanned: Tensor | None = None
    grids: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScanState:
    """What slots keep for one recurrence: float32 buffers, changed in place. The last row is nobody's and takes padding.

    Attributes:
        current: `[slots + 1, heads, key_dim, value_dim]`, behind the last token of each slot.
        anchor: the same behind the last whole block of each slot; None where the target walks token by token.
        tail: `[slots + 1, block, width]`, the inputs of the tokens since, at their places in the block; None as `anchor` is.
    """

    current: Tensor
    anchor: Tensor | None = None
    tail: Tensor | None = None


# From a call, the step's rows and the layer's state, which it takes on in place, to `[tokens, heads, value_dim]` float32.
# Results of padding and of idle rows are never read.
Scan = Callable[[ScanCall, ScanRows, ScanState], Tensor]


class RecurrenceBackend(Protocol):
    """Computes the recurrences of a model's forward pass.

    Attributes:
        layer_idx: the layer that asked its cache last; None before the first.
    """

    layer_idx: int | None

    def enter(self, layer_idx: Any) -> None:
        """A layer's code has asked its cache for something: what it computes next is this layer's."""

    def scan(self, kind: ScanKind, call: ScanCall) -> Tensor:
        """Returns `[tokens, heads, value_dim]` float32."""

    def leave(self, layer_idx: Any) -> None:
        """A layer hands over its last state."""


_Backends = tuple[RecurrenceBackend, ConvolutionBackend]
_backends: ContextVar[_Backends | None] = ContextVar("recurrences of the running forward pass", default=None)


@contextmanager
def scanning(backend: RecurrenceBackend, convolutions: ConvolutionBackend) -> Iterator[None]:
    """For the forward passes within: who computes recurrences, and who has the inputs that layers keep beside them."""
    token = _backends.set((backend, convolutions))
    try:
        yield
    finally:
        _backends.reset(token)


def running_backend() -> RecurrenceBackend | None:
    """None outside of a step."""
    backends = _backends.get()
    return None if backends is None else backends[0]


def running_convolutions() -> ConvolutionBackend | None:
    """None outside of a step."""
    backends = _backends.get()
    return None if backends is None else backends[1]


@dataclass
class LayerOfScan:
    """Numbers the recurrences of a forward pass: by the layer that asked its cache last, and by their order within it."""

    layer_idx: int | None = None
    counts: dict[int, int] = field(default_factory=dict)

    def enter(self, layer_idx: Any) -> None:
        self.layer_idx = plain_index(layer_idx)

    def leave(self, layer_idx: Any) -> None:
        if plain_index(layer_idx) != self.layer_idx or not self.counts.get(plain_index(layer_idx)):
            raise UnsupportedModelError(f"layer {plain_index(layer_idx)} keeps the state of a recurrence of its own")

    def number(self) -> tuple[int, int]:
        """Layer and index of the recurrence that is computed next."""
        if self.layer_idx is None:
            raise UnsupportedModelError("it computes a recurrence in a layer that does not ask its cache for anything")
        index = self.counts.get(self.layer_idx, 0)
        self.counts[self.layer_idx] = index + 1
        return self.layer_idx, index


class SlotScans(LayerOfScan):
    """Recurrence backend of the step graphs.

    Args:
        scans: by kind, how a recurrence is computed.
    """

    def __init__(self, cache: KVCache, rows: ScanRows, scans: dict[ScanKind, Scan]) -> None:
        super().__init__()
        self._cache = cache
        self._rows = rows
        self._scans = scans

    def scan(self, kind: ScanKind, call: ScanCall) -> Tensor:
        return self._scans[kind](call, self._rows, ScanState(*self._cache.recurrence(*self.number())))


def recurrence_of(layer_idx: int, index: int, call: ScanCall) -> RecurrentState:
    """What a recurrence keeps per slot."""
    return RecurrentState(layer_idx, index, call.heads, call.key.shape[2], call.value.shape[2], call.width)
