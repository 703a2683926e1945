# SPDX-License-Identifier: Apache-2.0
"""Compressed keys as transformers' layers write them: one for each group of consecutive tokens, which attention reads behind its window.

A layer's compressor hands each token's values and gates to the layer of its cache, gets back whole groups of them, makes a key of
each, and gets all keys so far. A step's tokens are of several slots, so the cache's layer here is a `CompressingLayer`: it gives
out the groups that tokens of the step end, each behind the one before it, and what it returns for their keys stands for those of
each token's own slot (`GroupKeys`): code may score over them, or have them behind the step's own keys, where attention finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from ...masks import UnsupportedModelError
from ...model_spec import Compression
from ...tracing.layer_index import plain_index
from ..selected_keys.index_keys import ASKED_COLUMNS, IndexKeys, ScoresOf


# Groups of tokens that a layer which is only looked at is given to make keys of.
_ASKED_WINDOWS = 2


class GroupWindows(NamedTuple):
    """Groups of tokens, of which keys are made.

    Attributes:
        values, gates: `[1, windows * rate, width]`, the tokens of each window side by side.
        first: `[windows]` int32, to be added to `window * rate`, which makes the position of a window's first token.
    """

    values: Tensor
    gates: Tensor
    first: Tensor


@dataclass(frozen=True)
class CompressedKeys:
    """What a layer's attention reads beside keys and values.

    Attributes:
        keys: `[slots, 1, groups, dim]`, the cache of them, also their values.
        rate: tokens that each stands for.
        selected: in the call of a layer `[tokens, groups]`, in that of a group of rows `[rows, tokens, groups]` bool: which of those that a
            token sees it attends to; None: all.
    """

    keys: Tensor
    rate: int
    selected: Tensor | None = None


class GroupSource(Protocol):
    """The compressed keys of each token's own slot, as `KeySource` has index keys."""

    @property
    def columns(self) -> int:
        """Of how many groups a slot has room for keys; 1, without meaning, where no token can see a whole group."""

    def products(self, query: Tensor) -> Tensor:
        """From `query [tokens, n, dim]` to its products `[tokens, n, columns]` with the keys, in the query's type."""

    def top(self, scores: Tensor, of: ScoresOf, count: int) -> NoIndices:
        """Keeps which groups have the largest `scores [tokens, 1, columns]`, so many, of what each token sees."""

    def attended(self) -> CompressedKeys | None:
        """What attention gets; None where no token can see a whole group."""


class CompressionBackend(Protocol):
    """Keeps what layers make compressed keys of, and these keys."""

    def windows(self, layer: CompressingLayer, index: int, values: Tensor, gates: Tensor) -> GroupWindows:
        """Takes those of the step's tokens, `[1, tokens, width]`."""

    def overlap(self, layer: CompressingLayer, index: int) -> None:
        """A key is made of its own group and of the one before it, which stands before it among the windows."""

    def keep_keys(self, layer: CompressingLayer, index: int, keys: Tensor) -> GroupSource:
        """Takes `keys [windows, dim]`, one of each window."""


class NoIndices(NamedTuple):
    """Stands for what a selection took: which groups these are is kept by layer, so that no code needs to be told.

    Attributes:
        indices: `[1, tokens, 0]`.
    """

    indices: Tensor

    @classmethod
    def of(cls, scores: Tensor) -> NoIndices:
        return cls(torch.zeros((1, len(scores), 0), dtype=torch.int64))


@dataclass
class CompressingLayer:
    """Stands for the layer of transformers' cache that keeps compressed keys.

    Attributes:
        rate: tokens of a group.
        selected: `[tokens, groups]` bool, what the layer selected in this step; None: all that a token sees.
    """

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
        return self.backend.windows(self, self._index(name), kv, gate)

    def update_overlap_state(self, name: str, *_: Any) -> tuple[None, None]:
        """Nothing comes before the first window: each that counts has the one before it in front."""
        self.backend.overlap(self, self._index(name))
        return None, None

    def update_compressor_states(self, name: str, compressed: Tensor) -> GroupKeys:
        source: Any = self.backend.keep_keys(self, self._index(name), compressed[0])  # of which nobody makes pools
        return GroupKeys(source, compressed.shape[-1], compressed.dtype)

    def _index(self, name: str) -> int:
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
    """The layers of a step's cache by their numbers, where they keep compressed keys.

    Args:
        rates: by layer, tokens of a group.
    """

    def __init__(self, backend: CompressionBackend, rates: Mapping[int, int]) -> None:
        self._backend = backend
        self._rates = rates
        self._layers: dict[int, CompressingLayer] = {}

    def __getitem__(self, layer_idx: Any) -> CompressingLayer:
        number = plain_index(layer_idx)
        if number not in self._rates:
            raise UnsupportedModelError(
                f"layer {number} keeps something in a layer of its cache that has no such state"
            )
        return self._layers.setdefault(number, CompressingLayer(self._backend, number, self._rates[number]))


class GroupKeys(IndexKeys):
    """Stands for the compressed keys `[1, columns, dim]` of each token's slot."""

    _source: Any  # a GroupSource

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def new_full(self, size: tuple[int, ...], value: float) -> Tensor:
        """For a bias over groups that a layer makes, and adds only to a mask that is a tensor."""
        return torch.full(size, value, dtype=self.dtype)

    def new_zeros(self, size: tuple[int, ...]) -> Tensor:
        return self.new_full(size, 0.0)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is torch.cat:
            return _joined(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class JoinedKeys:
    """Stands for keys or values, and behind them compressed ones, until attention gets them.

    Attributes:
        own: `[1, 1, tokens, dim]`, of the step's tokens.
        groups: those behind.
    """

    def __init__(self, own: Tensor, groups: GroupSource) -> None:
        self.own = own
        self.groups = groups

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"reads .{name} of them")

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> NoReturn:
        _refuse(f"passes them to {getattr(func, '__name__', func)}")


def _joined(tensors: Any, dim: int = 0) -> JoinedKeys:
    parts = list(tensors)
    own, keys = parts if len(parts) == 2 else (None, None)
    if not isinstance(own, Tensor) or not isinstance(keys, GroupKeys):
        _refuse("joins them in another order than behind a step's own")
    shape = keys.shape
    if own.dim() != 4 or len(shape) != 4 or dim not in (2, -2) or own.shape[1] != 1 or own.shape[3] != shape[3]:
        _refuse(f"joins {list(shape)} of them to keys {list(own.shape)} along dimension {dim}")
    return JoinedKeys(own, keys._source)


def split_joined(key: Any, value: Any) -> tuple[Tensor, Tensor, CompressedKeys | None]:
    """What attention is given, without compressed keys, and these."""
    groups = [each.groups if isinstance(each, JoinedKeys) else None for each in (key, value)]
    if groups[0] is None and groups[1] is None:
        return key, value, None
    if groups[0] is not groups[1] or groups[0] is None:
        _refuse("attends to keys with compressed ones and values with others")
    return key.own, value.own, groups[0].attended()


class AskedGroups:
    """Compressed keys of a layer that is only looked at."""

    columns = ASKED_COLUMNS

    def products(self, query: Tensor) -> Tensor:
        return query.new_zeros((*query.shape[:2], self.columns))

    def top(self, scores: Tensor, of: ScoresOf, count: int) -> NoIndices:
        return NoIndices.of(scores)

    def attended(self) -> None:
        return None


@dataclass
class CompressionRecorder:
    """Compression backend that learns what each layer keeps from one pass of the model."""

    compressions: list[Compression] = field(default_factory=list)

    def windows(self, layer: CompressingLayer, index: int, values: Tensor, gates: Tensor) -> GroupWindows:
        width = values.shape[-1] + gates.shape[-1]
        self.compressions.append(Compression(layer.layer_idx, index, layer.rate, spans=1, width=width, key_dim=0))
        first = torch.zeros(_ASKED_WINDOWS, dtype=torch.int32)
        values, gates = (each.new_zeros((1, _ASKED_WINDOWS * layer.rate, each.shape[-1])) for each in (values, gates))
        return GroupWindows(values, gates, first)

    def overlap(self, layer: CompressingLayer, index: int) -> None:
        self._change(layer, index, spans=2)

    def keep_keys(self, layer: CompressingLayer, index: int, keys: Tensor) -> AskedGroups:
        if len(keys) != _ASKED_WINDOWS:
            raise UnsupportedModelError(
                f"layer {layer.layer_idx} makes {len(keys)} keys of {_ASKED_WINDOWS} groups of {layer.rate} tokens"
            )
        self._change(layer, index, key_dim=keys.shape[1])
        return AskedGroups()

    def _change(self, layer: CompressingLayer, index: int, **sizes: int) -> None:
        places = [(each.layer_idx, each.index) for each in self.compressions]
        place = places.index((layer.layer_idx, index))
        self.compressions[place] = replace(self.compressions[place], **sizes)


def _refuse(what: str) -> NoReturn:
    raise UnsupportedModelError(f"it computes with its compressed keys in code of its own ({what})")
