# SPDX-License-Identifier: Apache-2.0
"""Inputs of convolutions: the state of a layer that convolves over its last tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....config import NeuronConfig
from ....errors import UnsupportedModelError
from ...attention.layout import StepLayout
from ...layer_state import LayerState
from ...spec import TensorSpec
from .convolution import SlotConvolutions


@dataclass(frozen=True)
class ConvolutionState(LayerState):
    """The inputs of the last `past` tokens for a causal convolution, `[batch_size + 1, past, channels]`.

    Attributes:
        index: numbers the layer's convolutions.
    """

    section = "convolutions"
    roles = ("conv",)
    index: int
    past: int
    channels: int

    def list_tensors(self, config: NeuronConfig) -> Iterator[TensorSpec]:
        shape = (config.batch_size + 1, self.past, self.channels)
        yield TensorSpec(f"kv_cache.conv_{self.layer_idx}_{self.index}", shape, config.dtype)

    @classmethod
    def make_recorder(cls, found: list[Any]) -> ConvolutionRecorder:
        return ConvolutionRecorder(found)

    @classmethod
    def make_backend(cls, step: StepLayout) -> SlotConvolutions:
        return SlotConvolutions(step.cache, *step.slot_places, step.ops.convolve)


@dataclass
class ConvolutionRecorder:
    """A convolution backend that only records which inputs layers keep."""

    found: list[Any]

    def convolve(self, layer_idx: int, index: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kernel = weight.shape[-1]
        if kernel < 2:
            raise UnsupportedModelError(
                f"layer {layer_idx} keeps the inputs of a convolution with a kernel of {kernel}"
            )
        self._add_state(ConvolutionState(layer_idx, index, kernel - 1, inputs.shape[1]))
        return inputs

    def read_before(self, layer_idx: int, index: int, inputs: Tensor, past: int) -> Tensor:
        _, channels, tokens = inputs.shape
        self._add_state(ConvolutionState(layer_idx, index, past, channels))
        return inputs.new_zeros((tokens, channels, past))

    def _add_state(self, state: ConvolutionState) -> None:
        if any((each.layer_idx, each.index) == (state.layer_idx, state.index) for each in self.found):
            raise UnsupportedModelError(f"layer {state.layer_idx} keeps inputs of several convolutions in one place")
        self.found.append(state)
