# SPDX-License-Identifier: Apache-2.0
"""What a model gets as `past_key_values` where its code needs one: a view of the step's cache.

Several kinds of models do. Some ask it how many tokens came before, to number positions themselves. Others attend in code of
their own, without transformers' attention interface: these get the keys and values of all slots in a row, and a mask
that leaves each token those of its own slot. That is as exact as the interface, but computes scores for all slots. Of those that
add a bias to their scores, the operators are read instead (see own_scores.py). The others
have the cache keep the inputs of convolutions (see convolution.py), the states of recurrences (recurrence.py), keys by which they
select keys (index_keys.py), or compressed keys (compression.py).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .features.compressed_keys.compression import CompressingLayers, CompressionBackend
from .features.convolution.convolution import ConvolutionBackend, ConvolutionInput
from .features.own_code.layers_by_token import keeps_own_state
from .features.own_code.own_run import running
from .features.own_code.own_scores import ScoreKeys
from .features.own_code.own_states import KeptState, StatesOfLayers, is_kept, state_of_run
from .features.recurrence.recurrence import RecurrenceBackend, scanning
from .features.recurrence.recurrent_functions import LastState
from .features.selected_keys.index_keys import IndexBackend, IndexKeys
from .interface import StepBackend, attending
from .masks import UnsupportedModelError
from .position_tables import numbering
from .tracing.layer_index import plain_index


# By what layers that select keys hand index keys to the cache, or to their layer of it.
_KEEP_INDEX = frozenset({"update_indexer", "update_index"})
# What layers that add a bias to their scores in code of their own call it where they take it.
BIASES = frozenset({"alibi", "position_bias"})


class KeyStore(Protocol):
    """Where a model that attends by itself puts the keys and values of a step."""

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Any, Any]:
        """Takes those of the step's tokens, returns those of all that a token may see under the step's mask."""


class ModelBackend(StepBackend, KeyStore, Protocol):
    """Serves models of all kinds."""


@dataclass(frozen=True)
class Backends:
    """Who computes what of a forward pass.

    Attributes:
        attention: attends, and takes the keys and values of a model that attends by itself.
        convolutions: computes those whose inputs the cache keeps.
        recurrences: computes those whose states it keeps, and is told which layer asks.
        index: keeps index keys.
        compressions: keeps compressed keys.
    """

    attention: ModelBackend
    convolutions: ConvolutionBackend
    recurrences: RecurrenceBackend
    index: IndexBackend
    compressions: CompressionBackend

    @contextmanager
    def serving(self, position_ids: Tensor) -> Iterator[None]:
        """For the forward passes within, of tokens at these positions `[tokens]`."""
        with attending(self.attention), scanning(self.recurrences, self.convolutions), numbering(position_ids):
            yield


class IndexCache:
    """The part of transformers' cache interface that layers use which select keys."""

    is_compileable = False

    def __init__(self, index: IndexBackend) -> None:
        self._index = index

    def get_seq_length(self, layer_idx: int = 0) -> Tensor | int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Nobody reads them: masks are made from positions."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Any, Any]:
        return key, value

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> IndexKeys:
        return IndexKeys.kept(self._index, plain_index(layer_idx), indexer_key_states)

    @property
    def layers(self) -> IndexLayers:
        return IndexLayers(self)


@dataclass(frozen=True)
class IndexLayers:
    """The layers of such a cache, by number."""

    cache: IndexCache

    def __getitem__(self, layer_idx: int) -> IndexLayer:
        return IndexLayer(self.cache, layer_idx)


@dataclass(frozen=True)
class IndexLayer:
    """A layer of the cache, as far as layers use it that select keys."""

    cache: IndexCache
    layer_idx: int

    def update_index(self, idx_k: Tensor) -> IndexKeys:
        return self.cache.update_indexer(idx_k, self.layer_idx)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModelError(f"it reads .{name} of a layer of its cache")


class StepCache(IndexCache):
    """The part that decoders use.

    Args:
        before: `[tokens]`, for a model that adds the number of tokens in the cache to the indices of the new ones: what gives
            positions. A number, for one that makes something of as many tokens as there are with the new ones. Others get 0: they
            are given positions.
        keys: of a model that attends by itself; None where the attention interface stores keys and values.
        columns: of a text, for a model that selects keys.
        rates: by layer that keeps compressed keys, tokens that each stands for.
    """

    def __init__(
        self,
        before: Tensor | int,
        keys: KeyStore | None,
        backends: Backends,
        rates: Mapping[int, int],
        columns: int | None = None,
    ) -> None:
        super().__init__(backends.index)
        self._compressing = CompressingLayers(backends.compressions, rates) if rates else None
        if columns is not None:
            # Of all keys, as a model of images keeps them: [3, 1, columns]. It puts those of the step's tokens behind them.
            self.position_ids = torch.arange(columns, dtype=torch.int32).expand(3, 1, -1)
        self._before = before
        self._keys = keys
        self._convolutions = backends.convolutions
        self._recurrences = backends.recurrences

    @property
    def layers(self) -> Any:
        """By number: states of the layer that runs, what layers hand compressed keys to, or index keys."""
        if running() is not None:
            return StatesOfLayers()
        return super().layers if self._compressing is None else self._compressing

    def get_seq_length(self, layer_idx: int = 0) -> Tensor | int:
        return self._before

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Any, Any]:
        self._recurrences.enter(layer_idx)
        return (key, value) if self._keys is None else self._keys.store(plain_index(layer_idx), key, value)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Never, for a layer's code: it then hands over all inputs, whatever their number. Always, for one that takes its state on
        by itself, a token at a time."""
        if layer_idx is not None:
            self._recurrences.enter(layer_idx)
        return running() is not None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, for the same reason."""

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, conv_states: Any, layer_idx: int, state_idx: int = 0, **_: object) -> Any:
        self._recurrences.enter(layer_idx)
        if is_kept(conv_states):
            return conv_states
        return ConvolutionInput(conv_states, partial(self._convolutions.convolve, plain_index(layer_idx), state_idx))

    def update_recurrent_state(
        self, recurrent_states: LastState | Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> LastState | Tensor:
        run = running()
        if run is not None and run.keeps(recurrent_states):
            return recurrent_states
        if not isinstance(recurrent_states, LastState):
            raise UnsupportedModelError(f"layer {plain_index(layer_idx)} keeps the state of a recurrence of its own")
        self._recurrences.leave(layer_idx)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> KeptState:
        self._recurrences.enter(layer_idx)
        return state_of_run()

    def set_linear_cache(self, layer_idx: int, linear_cache: object) -> None:
        if not is_kept(linear_cache):
            raise UnsupportedModelError(f"layer {plain_index(layer_idx)} keeps the state of a recurrence of its own")
        self._recurrences.leave(layer_idx)


@dataclass(frozen=True)
class CacheNeeds:
    """What of a cache a model's code asks for, and how it numbers positions.

    Attributes:
        by_itself: its attention is its own code, which takes all keys and values from the cache.
        biased: its attention is its own code, which adds a bias to scores, and is read as a call of attention.
        counts: an attention layer asks for the number of tokens before.
        numbers: so does its decoder, which takes no positions and numbers tokens from there on.
        convolves: a layer has it keep the inputs of a convolution or the state of a recurrence.
        indexes: a layer has it keep index keys.
        rates: by layer that has it keep compressed keys, how many tokens transformers' own cache makes each of.
        first_position: the number of a text's first token, where the model makes positions of token ids: those behind padding's.
        keyword: how the model's forward pass calls it: models without attention have a name of their own.
    """

    by_itself: bool
    biased: bool
    counts: bool
    numbers: bool
    convolves: bool
    indexes: bool
    rates: Mapping[int, int] = field(default_factory=dict)
    first_position: int = 0
    keyword: str = "past_key_values"

    @classmethod
    def of(cls, model: nn.Module) -> CacheNeeds:
        used = {name for module in model.modules() for name in _names(module)}
        own, biased = _attends_by_itself(model), any(BIASES & _parameters(module) for module in model.modules())
        takes = inspect.signature(model.forward).parameters
        return cls(
            by_itself=own and not biased,
            biased=own and biased,
            counts=_counts_tokens(model),
            numbers=not own and _numbers_tokens(model),
            convolves=bool(used & {"update_conv_state", "update_recurrent_state", "get_linear_cache"}),
            indexes=bool(used & _KEEP_INDEX),
            rates=_compression_rates(model) if "store_compression_weights" in used else {},
            first_position=_first_position(model),
            keyword="cache_params" if "cache_params" in takes else "past_key_values",
        )

    def arguments(self, position_ids: Tensor, backends: Backends, columns: int) -> dict[str, Any]:
        """What a step passes to the model beside token ids.

        Args:
            position_ids: `[tokens]`, from 0 on.
            columns: tokens of the longest text, whatever the step's context is.
        """
        numbers = position_ids + self.first_position if self.first_position else position_ids
        arguments: dict[str, Any] = {"position_ids": numbers[None]}
        cache = self._cache(position_ids, backends, columns)
        if cache is not None:
            arguments[self.keyword] = cache
        if self.numbers:  # nobody reads it: a mask that there is not would be made from the number of tokens before
            arguments["attention_mask"] = torch.ones((1, len(position_ids)), dtype=torch.int32)
        return arguments

    def _cache(self, position_ids: Tensor, backends: Backends, columns: int) -> StepCache | None:
        """None where nothing is asked for."""
        if self.biased:
            return StepCache(columns - len(position_ids), ScoreKeys(backends.attention, columns), backends, self.rates)
        keeps = self.convolves or self.indexes or self.rates
        if not (self.by_itself or self.counts or self.numbers or keeps):
            return None
        asked = self.counts or self.numbers
        before = position_ids - torch.arange(len(position_ids), dtype=torch.int32) if asked else 0
        keys = backends.attention if self.by_itself else None
        return StepCache(before, keys, backends, self.rates, columns if self.indexes else None)


def keeps_convolution(module: nn.Module) -> bool:
    """Whether a module's own code has the cache keep the inputs of a convolution."""
    return "update_conv_state" in _names(module)


def keeps_recurrence(module: nn.Module) -> bool:
    """Whether a module's own code has the cache keep the state of a recurrence."""
    return "update_recurrent_state" in _names(module) or keeps_own_state(module)


def keeps_keys(module: nn.Module) -> bool:
    """Whether a module's own code has the cache keep keys and values."""
    return "update" in _names(module)


def selects_keys(module: nn.Module) -> bool:
    """Whether a module's own code has the cache keep keys by which it selects keys."""
    names = set(_names(module))
    return bool(_KEEP_INDEX & names) or {"update_compressor_states", "topk"} <= names


def _compression_rates(model: nn.Module) -> dict[int, int]:
    layers = DynamicCache(config=model.config).layers
    return {index: layer.compress_rate for index, layer in enumerate(layers) if hasattr(layer, "compress_rate")}


def _attends_by_itself(model: nn.Module) -> bool:
    """Whether no code of the model knows transformers' attention functions."""
    files = {type(module).__module__ for module in model.modules()}
    return not any(
        value is ALL_ATTENTION_FUNCTIONS
        for name in files
        if not name.startswith("torch.")
        for value in vars(sys.modules[name]).values()
    )


def _counts_tokens(model: nn.Module) -> bool:
    return any(hasattr(module, "layer_idx") and "get_seq_length" in _names(module) for module in model.modules())


def _numbers_tokens(model: nn.Module) -> bool:
    """Whether no module with parts takes positions, and one asks for the number of tokens before."""
    modules = [module for module in model.modules() if list(module.children())]
    return not any("position_ids" in _parameters(module) for module in modules) and any(
        "get_seq_length" in _names(module) for module in modules
    )


def _first_position(model: nn.Module) -> int:
    """As transformers' `create_position_ids_from_input_ids` numbers tokens, where a module that takes positions falls back to it."""
    for module in model.modules():
        names, padding = _names(module), getattr(module, "padding_idx", None)
        if "create_position_ids_from_input_ids" in names and isinstance(padding, int):
            return padding + 1 if "position_ids" in _parameters(module) else 0
    return 0


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)


def _names(module: nn.Module) -> tuple[str, ...]:
    """Attributes and globals that a module's own forward pass names."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names
