# SPDX-License-Identifier: Apache-2.0
"""The cache of one step, and the ways in which a model's code uses it and numbers its tokens, read from the code's names."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import UnsupportedModelError
from .attention.cached_attention import CachedAttention, KeyRecorder
from .attention.state import KeyValueState
from .features.compressed_keys.compression import CompressingLayers
from .features.compressed_keys.state import CompressedKeyState
from .features.convolution.convolution import ConvolutionInput
from .features.convolution.state import ConvolutionState
from .features.own_code.layers_by_token import keeps_own_state, names_in_forward
from .features.own_code.own_scores import ScoreKeys
from .features.own_code.own_states import OwnState, StatesOfLayers, is_kept, running_layer, state_of_run
from .features.recurrence.recurrent_functions import LastState
from .features.recurrence.state import RecurrentState
from .features.selected_keys.indexers import IndexCache
from .features.selected_keys.state import IndexKeyState
from .serving import Backends, plain_index


class StepCache(IndexCache):
    """transformers' cache interface, as decoders use it: it hands everything to the backends of the running step.

    `before` is `[tokens]` for a model that adds the number of tokens in the cache to the indices of new ones, a number for one that makes
    something of as many tokens as there are. `keys` are for a model that attends by code of its own, `columns`, the tokens of a text, for
    one that selects keys. `rates` has, by layer that keeps compressed keys, the tokens that each stands for.
    """

    def __init__(
        self,
        before: Tensor | int,
        keys: CachedAttention | KeyRecorder | ScoreKeys | None,
        backends: Backends,
        rates: Mapping[int, int],
        columns: int | None = None,
    ) -> None:
        super().__init__(backends[IndexKeyState])
        self._compressing = CompressingLayers(backends[CompressedKeyState], rates) if rates else None
        if columns is not None:
            # A model of images keeps the positions of all keys so, [3, 1, columns], and adds those of the step's tokens.
            self.position_ids = torch.arange(columns, dtype=torch.int32).expand(3, 1, -1)
        self._before = before
        self._keys = keys
        self._convolutions = backends[ConvolutionState]
        self._recurrences = backends[RecurrentState]

    @property
    def layers(self) -> Any:
        """The layers by number: states of the layer that runs, compressing layers, or layers with index keys."""
        if running_layer() is not None:
            return StatesOfLayers()
        return super().layers if self._compressing is None else self._compressing

    def get_seq_length(self, layer_idx: int = 0) -> Tensor | int:
        return self._before

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Any, Any]:
        self._recurrences.enter_layer(layer_idx)
        return (key, value) if self._keys is None else self._keys.store(plain_index(layer_idx), key, value)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return False, so that a layer hands over all inputs; True for a layer that takes its state on token by token."""
        if layer_idx is not None:
            self._recurrences.enter_layer(layer_idx)
        return running_layer() is not None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that a layer hands over all inputs."""

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, conv_states: Any, layer_idx: int, state_idx: int = 0, **_: object) -> Any:
        self._recurrences.enter_layer(layer_idx)
        if is_kept(conv_states):
            return conv_states
        return ConvolutionInput(conv_states, partial(self._convolutions.convolve, plain_index(layer_idx), state_idx))

    def update_recurrent_state(
        self, recurrent_states: LastState | Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> LastState | Tensor:
        run = running_layer()
        if run is not None and run.keeps_inputs(recurrent_states):
            return recurrent_states
        if not isinstance(recurrent_states, LastState):
            raise UnsupportedModelError(f"layer {plain_index(layer_idx)} keeps the state of a recurrence of its own")
        self._recurrences.leave_layer(layer_idx)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> OwnState:
        self._recurrences.enter_layer(layer_idx)
        return state_of_run()

    def set_linear_cache(self, layer_idx: int, linear_cache: object) -> None:
        if not is_kept(linear_cache):
            raise UnsupportedModelError(f"layer {plain_index(layer_idx)} keeps the state of a recurrence of its own")
        self._recurrences.leave_layer(layer_idx)


# Methods by which layers that select keys hand index keys to the cache, or to their layer of it.
_KEEP_INDEX = frozenset({"update_indexer", "update_index"})
# Parameters of layers that add a bias to their scores in code of their own.
BIASES = frozenset({"alibi", "position_bias"})


@dataclass(frozen=True)
class CacheNeeds:
    """The parts of a cache that a model's code uses, and how it numbers positions.

    Attributes:
        by_itself: its attention is its own code, which takes all keys and values from the cache.
        biased: its attention is its own code, which adds a bias to scores, and is read as a call of attention.
        counts: an attention layer asks for the number of tokens before.
        numbers: so does its decoder, which takes no positions and numbers tokens from there.
        convolves: a layer keeps the inputs of a convolution or the state of a recurrence.
        rates: for each layer with compressed keys, the tokens that transformers' own cache makes each of.
        first_position: the number of a text's first token, where the model makes positions of token ids.
        keyword: the cache's name in the model's forward pass: models without attention have their own.
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
    def read_code(cls, model: nn.Module) -> CacheNeeds:
        modules = list(model.modules())
        used = {name for module in modules for name in names_in_forward(module)}
        own, biased = _attends_by_itself(model), any(BIASES & _parameters_of(module) for module in modules)
        compressing = "store_compression_weights" in used
        layers = enumerate(DynamicCache(config=model.config).layers) if compressing else ()
        return cls(
            by_itself=own and not biased,
            biased=own and biased,
            counts=any(
                hasattr(module, "layer_idx") and "get_seq_length" in names_in_forward(module) for module in modules
            ),
            numbers=not own and _numbers_tokens(model),
            convolves=bool(used & {"update_conv_state", "update_recurrent_state", "get_linear_cache"}),
            indexes=bool(used & _KEEP_INDEX),
            rates={index: layer.compress_rate for index, layer in layers if hasattr(layer, "compress_rate")},
            first_position=_first_position(model),
            keyword="cache_params" if "cache_params" in _parameters_of(model) else "past_key_values",
        )

    def arguments(self, position_ids: Tensor, backends: Backends, columns: int) -> dict[str, Any]:
        """Return a step's arguments but for token ids, from `position_ids [tokens]`; `columns` are the tokens of the longest text."""
        tokens, keys = len(position_ids), backends[KeyValueState]
        numbers = position_ids + self.first_position if self.first_position else position_ids
        arguments: dict[str, Any] = {"position_ids": numbers[None]}
        asked = self.counts or self.numbers
        if self.biased:
            arguments[self.keyword] = StepCache(columns - tokens, ScoreKeys(keys, columns), backends, self.rates)
        elif self.by_itself or asked or self.convolves or self.indexes or self.rates:
            before = position_ids - torch.arange(tokens, dtype=torch.int32) if asked else 0
            own_keys, indexed = keys if self.by_itself else None, columns if self.indexes else None
            arguments[self.keyword] = StepCache(before, own_keys, backends, self.rates, indexed)
        if self.numbers:  # not read: without a mask, code would make one from the number of tokens before
            arguments["attention_mask"] = torch.ones((1, tokens), dtype=torch.int32)
        return arguments


def keeps_convolution(module: nn.Module) -> bool:
    return "update_conv_state" in names_in_forward(module)


def keeps_recurrence(module: nn.Module) -> bool:
    return "update_recurrent_state" in names_in_forward(module) or keeps_own_state(module)


def keeps_keys(module: nn.Module) -> bool:
    return "update" in names_in_forward(module)


def selects_keys(module: nn.Module) -> bool:
    names = set(names_in_forward(module))
    return bool(_KEEP_INDEX & names) or {"update_compressor_states", "topk"} <= names


def _attends_by_itself(model: nn.Module) -> bool:
    """Return whether no code of the model knows transformers' attention functions."""
    files = {type(module).__module__ for module in model.modules()}
    return not any(
        value is ALL_ATTENTION_FUNCTIONS
        for name in files
        if not name.startswith("torch.")
        for value in vars(sys.modules[name]).values()
    )


def _numbers_tokens(model: nn.Module) -> bool:
    """Return whether no module with parts takes positions, and one asks for the number of tokens before."""
    modules = [module for module in model.modules() if list(module.children())]
    return not any("position_ids" in _parameters_of(module) for module in modules) and any(
        "get_seq_length" in names_in_forward(module) for module in modules
    )


def _first_position(model: nn.Module) -> int:
    """Return the first number of transformers' `create_position_ids_from_input_ids`, where a module that takes positions uses it."""
    for module in model.modules():
        names, padding = names_in_forward(module), getattr(module, "padding_idx", None)
        if "create_position_ids_from_input_ids" in names and isinstance(padding, int):
            return padding + 1 if "position_ids" in _parameters_of(module) else 0
    return 0


def _parameters_of(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)
