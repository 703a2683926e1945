# SPDX-License-Identifier: Apache-2.0
"""What a model gets as `past_key_values` where its code needs one: a view of the step's cache.

Three kinds of models do. Some ask it how many tokens came before, to number positions themselves. Others attend in code of
their own, without transformers' attention interface: these get the keys and values of all slots in a row, and a mask
that leaves each token those of its own slot. That is as exact as the interface, but computes scores for all slots. A third
kind has the cache keep the inputs of its convolutions (see convolution.py).
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .convolution import ConvolutionBackend, ConvolutionInput
from .layer_index import plain_index


class KeyStore(Protocol):
    """Where a model that attends by itself puts the keys and values of a step."""

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Takes those of the step's tokens, returns those of all that a token may see under the step's mask."""


class StepCache:
    """The part of transformers' cache interface that decoders use.

    Args:
        before: `[tokens]`, for a model that adds the number of tokens in the cache to the indices of the new ones: what gives
            positions. Others get 0: they are given positions.
        keys: of a model that attends by itself; None where the attention interface stores keys and values.
        convolutions: compute those whose inputs the cache keeps.
    """

    is_compileable = False

    def __init__(self, before: Tensor | None, keys: KeyStore | None, convolutions: ConvolutionBackend) -> None:
        self._before = before
        self._keys = keys
        self._convolutions = convolutions

    def get_seq_length(self, layer_idx: int = 0) -> Tensor | int:
        return 0 if self._before is None else self._before

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Nobody reads them: masks are made from positions."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return (key, value) if self._keys is None else self._keys.store(plain_index(layer_idx), key, value)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Never, for a layer's code: it then hands over all inputs, whatever their number."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, for the same reason."""

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> ConvolutionInput:
        return ConvolutionInput(conv_states, partial(self._convolutions.convolve, plain_index(layer_idx), state_idx))


@dataclass(frozen=True)
class CacheNeeds:
    """What of a cache a model's code asks for.

    Attributes:
        by_itself: its attention is its own code, which takes all keys and values from the cache.
        counts: an attention layer asks for the number of tokens before.
        convolves: a layer has it keep the inputs of a convolution, and none has it keep the state of a recurrence.
    """

    by_itself: bool
    counts: bool
    convolves: bool

    @classmethod
    def of(cls, model: nn.Module) -> CacheNeeds:
        used = {name for module in model.modules() for name in _names(module)}
        convolves = "update_conv_state" in used and "update_recurrent_state" not in used
        return cls(_attends_by_itself(model), _counts_tokens(model), convolves)

    def cache(self, position_ids: Tensor, keys: KeyStore, convolutions: ConvolutionBackend) -> StepCache | None:
        """What a step passes as `past_key_values`: None where nothing is asked for.

        Args:
            position_ids: `[tokens]`.
        """
        if not (self.by_itself or self.counts or self.convolves):
            return None
        before = position_ids - torch.arange(len(position_ids), dtype=torch.int32) if self.counts else None
        return StepCache(before, keys if self.by_itself else None, convolutions)


def keeps_convolution(module: nn.Module) -> bool:
    """Whether a module's own code has the cache keep the inputs of a convolution."""
    return "update_conv_state" in _names(module)


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


def _names(module: nn.Module) -> tuple[str, ...]:
    """Attributes and globals that a module's own forward pass names."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names
