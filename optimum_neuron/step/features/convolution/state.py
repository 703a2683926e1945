# SPDX-License-Identifier: Apache-2.0
"""Inputs of convolutions: the state of a layer that convolves over its last tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....config import NeuronConfig
from ...layer_state import LayerState
from ...spec import TensorSpec


if TYPE_CHECKING:
    from ...attention.layout import StepLayout
    from .convolution import SlotConvolutions
    from .recorder import ConvolutionRecorder


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
        from .recorder import ConvolutionRecorder

        return ConvolutionRecorder(found, cls)

    @classmethod
    def make_backend(cls, step: StepLayout) -> SlotConvolutions:
        from .convolution import SlotConvolutions

        return SlotConvolutions(step.cache, *step.slot_places, step.ops.convolve)
