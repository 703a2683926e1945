# SPDX-License-Identifier: Apache-2.0
"""Learns what the layers of a model keep of a text, from one pass of its own code."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .features.compressed_keys.compression import CompressionRecorder
from .features.convolution.convolution import state_of
from .features.own_code.own_scores import BiasMask
from .features.recurrence.recurrence import LayerOfScan, ScanCall, ScanKind, recurrence_of
from .features.selected_keys.index_keys import AskedKeys, KeySource
from .interface import AttentionCall
from .masks import CausalMask, UnsupportedModelError
from .model_spec import ConvolutionState, KeySelection, LayerCache, RecurrentState


# Between the numbers of the caches of a layer that attends several times; more than any model's layers.
CALLS_APART = 100_000


@dataclass
class LayerCalls:
    """Numbers the caches of one forward pass: a layer that attends several times has one for each time."""

    counts: dict[int, int] = field(default_factory=dict)

    def number(self, layer_idx: int) -> int:
        """The layer's own number where it attends once."""
        before = self.counts.get(layer_idx, 0)
        self.counts[layer_idx] = before + 1
        return layer_idx + before * CALLS_APART


@dataclass
class LayerRecorder(LayerOfScan, CompressionRecorder):
    """Backend of attention and of all that layers keep beside keys and values: learns what that is from one pass of the model."""

    by_itself: bool = False
    biased: bool = False
    layers: list[LayerCache] = field(default_factory=list)
    convolutions: list[ConvolutionState] = field(default_factory=list)
    recurrences: list[RecurrentState] = field(default_factory=list)
    selections: list[KeySelection] = field(default_factory=list)
    calls: LayerCalls = field(default_factory=LayerCalls)

    def attend(self, call: AttentionCall) -> Tensor:
        self.store(call.layer_idx, call.key, call.value)
        return call.query.new_zeros((1, call.query.shape[2], call.query.shape[1], call.value.shape[-1]))

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        number = self.calls.number(layer_idx)
        self.layers.append(LayerCache(number, key.shape[1], key.shape[-1], value.shape[-1]))
        return key, value

    def convolve(self, layer_idx: int, index: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self._keep_inputs(state_of(layer_idx, index, inputs, weight))
        return inputs

    def before(self, layer_idx: int, index: int, inputs: Tensor, past: int) -> Tensor:
        _, channels, tokens = inputs.shape
        self._keep_inputs(ConvolutionState(layer_idx, index, past, channels))
        return inputs.new_zeros((tokens, channels, past))

    def _keep_inputs(self, state: ConvolutionState) -> None:
        if any((each.layer_idx, each.index) == (state.layer_idx, state.index) for each in self.convolutions):
            raise UnsupportedModelError(f"layer {state.layer_idx} keeps inputs of several convolutions in one place")
        self.convolutions.append(state)

    def scan(self, kind: ScanKind, call: ScanCall) -> Tensor:
        self.recurrences.append(recurrence_of(*self.number(), call))
        return torch.zeros_like(call.value)

    def keep_index(self, layer_idx: int, keys: Tensor) -> KeySource:
        if any(each.layer_idx == layer_idx for each in self.selections):
            raise UnsupportedModelError(f"layer {layer_idx} keeps several sets of index keys")

        def tell(always: int, width: int) -> None:
            self.selections.append(KeySelection(layer_idx, keys.shape[1], always, width))

        return AskedKeys(tell)

    def bias(self, mask: CausalMask, dtype: torch.dtype) -> CausalMask | Tensor | None:
        if self.biased:
            return BiasMask(mask, dtype)
        if not self.by_itself:
            return None
        mask.visible_window()
        return torch.zeros((1, 1, 1, 1), dtype=dtype)
