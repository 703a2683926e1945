# SPDX-License-Identifier: Apache-2.0
"""Compressed keys as transformers' layers write them.

A layer's compressor hands each token's values and gates to the layer of its cache, gets back whole groups of them, makes a key of each,
and gets all keys so far. Here that layer is a `CompressingLayer`. It gives the groups that tokens of the step end, and returns
`GroupKeys` for those of each token's own slot. Code may score over them, or put them after the step's own keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ....errors import UnsupportedModelError
from ...attention.rows import CompressedKeys
from ...layer_state import StateRecorder
from ...serving import StandIn, plain_index
from ..selected_keys.index_keys import ASKED_COLUMNS, IndexKeys, KeySource, ScoresOf


class GroupWindows(NamedTuple):
    """Groups of tokens, `[1, windows * rate, width]`; `first [windows]` int32 plus `window * rate` is the position of a first token."""

    values: Tensor
    gates: Tensor
    first: Tensor


class GroupSource(KeySource):
    """The compressed keys of each token's own slot; here those of a layer that is only recorded."""

    columns = ASKED_COLUMNS

    def select_top(self, scores: Tensor, of: ScoresOf, count: int) -> NoIndices:
        """Keep the `count` groups with the largest `scores [tokens, 1, columns]` of those that each token sees."""
        return NoIndices.for_scores(scores)

    def attended_keys(self) -> CompressedKeys | None:
        """Return what attention gets; None where no token can see a whole group."""
        return None


class CompressionBackend(Protocol):
    """A backend that keeps compressed keys, and what they are made of, of the step's tokens `[1, tokens, width]`."""

    def take_windows(self, layer: CompressingLayer, index: int, values: Tensor, gates: Tensor) -> GroupWindows:
        """Take values and gates of tokens."""

    def add_overlap(self, layer: CompressingLayer, index: int) -> None:
        """Make keys of their own group and of the one before it among the windows."""

    def keep_keys(self, layer: CompressingLayer, index: int, keys: Tensor) -> GroupSource:
        """Take `keys [windows, dim]`, one of each window."""


class NoIndices(NamedTuple):
    """A stand-in for the result of a selection, which the layer itself keeps. `indices` are `[1, tokens, 0]`."""

    indices: Tensor

    @classmethod
    def for_scores(cls, scores: Tensor) -> NoIndices:
        return cls(torch.zeros((1, len(scores), 0), dtype=torch.int64))


@dataclass
class CompressingLayer:
    """A stand-in for a cache's layer with compressed keys, each of `rate` tokens; `selected` are `[tokens, groups]`, None: all."""

    backend: CompressionBackend
    layer_idx: int
    rate: int
    selected: Tensor | None = None
    names: list[str] = field(default_factory=list)

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> GroupWindows:
        if kv.dim() != 3 or gate.shape != kv.shape:
            raise UnsupportedModelError(
                f"layer {self.layer_idx} makes compressed keys of values {list(kv.shape)} and gates {list(gate.shape)}"
            )
        if name in self.names:
            raise UnsupportedModelError(f"layer {self.layer_idx} keeps compressed keys twice by the name {name!r}")
        self.names.append(name)
        return self.backend.take_windows(self, self._index_of(name), kv, gate)

    def update_overlap_state(self, name: str, *_: Any) -> tuple[None, None]:
        """Return nothing before the first window: each that counts has the one before it in front."""
        self.backend.add_overlap(self, self._index_of(name))
        return None, None

    def update_compressor_states(self, name: str, compressed: Tensor) -> GroupKeys:
        source = self.backend.keep_keys(self, self._index_of(name), compressed[0])
        return GroupKeys(source, compressed.shape[-1], compressed.dtype)

    def _index_of(self, name: str) -> int:
        if name not in self.names:
            raise UnsupportedModelError(
                f"layer {self.layer_idx} keeps compressed keys of no tokens by the name {name!r}"
            )
        return self.names.index(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModelError(f"layer {self.layer_idx} reads .{name} of its cache, which no step keeps")


class CompressingLayers:
    """The layers of a step's cache by their numbers; `rates` has those that keep compressed keys."""

    def __init__(self, backend: CompressionBackend, rates: Mapping[int, int]) -> None:
        self._layers = {number: CompressingLayer(backend, number, rate) for number, rate in rates.items()}

    def __getitem__(self, layer_idx: Any) -> CompressingLayer:
        number = plain_index(layer_idx)
        if number not in self._layers:
            raise UnsupportedModelError(
                f"layer {number} keeps something in a layer of its cache that has no such state"
            )
        return self._layers[number]


class GroupKeys(IndexKeys):
    """A stand-in for the compressed keys `[1, columns, dim]` of each token's slot."""

    device = torch.device("cpu")

    def new_full(self, size: tuple[int, ...], value: float) -> Tensor:
        """Return a bias over groups, which a layer adds only to a mask that is a tensor."""
        return torch.full(size, value, dtype=self.dtype)

    def new_zeros(self, size: tuple[int, ...]) -> Tensor:
        return self.new_full(size, 0.0)

    def call_torch(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not torch.cat:
            return super().call_torch(func, args, kwargs)
        (own, *others), dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if not isinstance(own, Tensor) or others != [self]:
            JoinedKeys.refuse_use("joins them in another order than after a step's own")
        shape = self.shape
        if own.dim() != 4 or len(shape) != 4 or dim not in (2, -2) or own.shape[1] != 1 or own.shape[3] != shape[3]:
            JoinedKeys.refuse_use(f"joins {list(shape)} of them to keys {list(own.shape)} along dimension {dim}")
        return JoinedKeys(own, self.source)


@dataclass(frozen=True)
class JoinedKeys(StandIn):
    """A stand-in for keys or values `own [1, 1, tokens, dim]` followed by compressed ones, until attention gets them."""

    refusal = "it computes with its compressed keys in code of its own ({})"
    own: Tensor
    groups: GroupSource


def split_joined(key: Any, value: Any) -> tuple[Tensor, Tensor, CompressedKeys | None]:
    """Return keys and values without compressed ones, and these."""
    groups = [each.groups if isinstance(each, JoinedKeys) else None for each in (key, value)]
    if groups[0] is None and groups[1] is None:
        return key, value, None
    if groups[0] is not groups[1] or groups[0] is None:
        JoinedKeys.refuse_use("attends to keys with compressed ones and values with others")
    return key.own, value.own, groups[0].attended_keys()


# Groups of tokens that a recorded layer makes keys of.
_ASKED_WINDOWS = 2


class CompressionRecorder(StateRecorder):
    def take_windows(self, layer: CompressingLayer, index: int, values: Tensor, gates: Tensor) -> GroupWindows:
        width = values.shape[-1] + gates.shape[-1]
        self.add_state("compressed keys twice in one place", layer.layer_idx, index, layer.rate, 1, width, 0)
        first = torch.zeros(_ASKED_WINDOWS, dtype=torch.int32)
        values, gates = (each.new_zeros((1, _ASKED_WINDOWS * layer.rate, each.shape[-1])) for each in (values, gates))
        return GroupWindows(values, gates, first)

    def add_overlap(self, layer: CompressingLayer, index: int) -> None:
        self._change_state(layer, index, spans=2)

    def keep_keys(self, layer: CompressingLayer, index: int, keys: Tensor) -> GroupSource:
        if len(keys) != _ASKED_WINDOWS:
            raise UnsupportedModelError(
                f"layer {layer.layer_idx} makes {len(keys)} keys of {_ASKED_WINDOWS} groups of {layer.rate} tokens"
            )
        self._change_state(layer, index, key_dim=keys.shape[1])
        return GroupSource()

    def _change_state(self, layer: CompressingLayer, index: int, **sizes: int) -> None:
        place = [each.numbers for each in self.found].index((layer.layer_idx, index))
        self.found[place] = replace(self.found[place], **sizes)
