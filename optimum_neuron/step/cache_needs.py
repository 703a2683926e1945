# SPDX-License-Identifier: Apache-2.0
"""The ways in which a model's code uses its cache and numbers its tokens, read from the code's names."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention.state import KeyValueState
from .features.own_code.layers_by_token import keeps_own_state, names_in_forward
from .features.own_code.own_scores import ScoreKeys
from .serving import Backends
from .step_cache import StepCache


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
        indexes: a layer keeps index keys.
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
        used = {name for module in model.modules() for name in names_in_forward(module)}
        own, biased = _attends_by_itself(model), any(BIASES & _parameters_of(module) for module in model.modules())
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
        """Return the arguments of the model in a step, without token ids.

        Args:
            position_ids: `[tokens]`, from 0 on.
            columns: tokens of the longest text, whatever the step's context is.
        """
        numbers = position_ids + self.first_position if self.first_position else position_ids
        arguments: dict[str, Any] = {"position_ids": numbers[None]}
        cache = self._make_cache(position_ids, backends, columns)
        if cache is not None:
            arguments[self.keyword] = cache
        if self.numbers:  # not read: without a mask, code would make one from the number of tokens before
            arguments["attention_mask"] = torch.ones((1, len(position_ids)), dtype=torch.int32)
        return arguments

    def _make_cache(self, position_ids: Tensor, backends: Backends, columns: int) -> StepCache | None:
        """Return the cache; None where the model asks for nothing."""
        if self.biased:
            return StepCache(
                columns - len(position_ids), ScoreKeys(backends[KeyValueState], columns), backends, self.rates
            )
        keeps = self.convolves or self.indexes or self.rates
        if not (self.by_itself or self.counts or self.numbers or keeps):
            return None
        asked = self.counts or self.numbers
        before = position_ids - torch.arange(len(position_ids), dtype=torch.int32) if asked else 0
        keys = backends[KeyValueState] if self.by_itself else None
        return StepCache(before, keys, backends, self.rates, columns if self.indexes else None)


def keeps_convolution(module: nn.Module) -> bool:
    """Return whether a module's own code has the cache keep the inputs of a convolution."""
    return "update_conv_state" in names_in_forward(module)


def keeps_recurrence(module: nn.Module) -> bool:
    """Return whether a module's own code has the cache keep the state of a recurrence."""
    return "update_recurrent_state" in names_in_forward(module) or keeps_own_state(module)


def keeps_keys(module: nn.Module) -> bool:
    """Return whether a module's own code has the cache keep keys and values."""
    return "update" in names_in_forward(module)


def selects_keys(module: nn.Module) -> bool:
    """Return whether a module's own code has the cache keep index keys."""
    names = set(names_in_forward(module))
    return bool(_KEEP_INDEX & names) or {"update_compressor_states", "topk"} <= names


def _compression_rates(model: nn.Module) -> dict[int, int]:
    layers = DynamicCache(config=model.config).layers
    return {index: layer.compress_rate for index, layer in enumerate(layers) if hasattr(layer, "compress_rate")}


def _attends_by_itself(model: nn.Module) -> bool:
    """Return whether no code of the model knows transformers' attention functions."""
    files = {type(module).__module__ for module in model.modules()}
    return not any(
        value is ALL_ATTENTION_FUNCTIONS
        for name in files
        if not name.startswith("torch.")
        for value in vars(sys.modules[name]).values()
    )


def _counts_tokens(model: nn.Module) -> bool:
    return any(
        hasattr(module, "layer_idx") and "get_seq_length" in names_in_forward(module) for module in model.modules()
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
