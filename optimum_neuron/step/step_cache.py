# SPDX-License-Identifier: Apache-2.0
"""transformers' cache interface, as decoders use it: it hands everything to the backends of the running step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedModelError
from .attention.call import KeyBackend
from .features.compressed_keys.compression import CompressingLayers
from .features.compressed_keys.state import CompressedKeyState
from .features.convolution.convolution import ConvolutionInput
from .features.convolution.state import ConvolutionState
from .features.own_code.own_run import running_layer
from .features.own_code.own_scores import ScoreKeys
from .features.own_code.own_states import OwnState, StatesOfLayers, is_kept, state_of_run
from .features.recurrence.recurrent_functions import LastState
from .features.recurrence.state import RecurrentState
from .features.selected_keys.indexers import IndexCache
from .features.selected_keys.state import IndexKeyState
from .layer_numbers import plain_index
from .serving import Backends


class StepCache(IndexCache):
    """The cache of one step.

    Args:
        before: `[tokens]`, for a model that adds the number of tokens in the cache to the indices of the new ones: what gives
            positions. A number, for one that makes something of as many tokens as there are with the new ones. Others get 0: they
            are given positions.
        keys: for a model that attends by code of its own; None where the attention interface stores keys and values.
        columns: tokens of a text, for a model that selects keys.
        rates: by layer that keeps compressed keys, tokens that each stands for.
    """

    def __init__(
        self,
        before: Tensor | int,
        keys: KeyBackend | ScoreKeys | None,
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
