# SPDX-License-Identifier: Apache-2.0
"""Inputs of convolutions: the state of a layer that convolves over its last tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ....config import NeuronConfig
from ...layer_state import LayerState


@dataclass(frozen=True)
class ConvolutionState(LayerState):
    """The inputs of the last `past` tokens for the layer's causal convolution of number `index`, `[batch_size + 1, past, channels]`."""

    section = "convolutions"
    roles = ("conv",)
    index: int
    past: int
    channels: int

    def list_sizes(self, config: NeuronConfig) -> Iterator[tuple[str, tuple[int, ...], str]]:
        yield "conv", (config.batch_size + 1, self.past, self.channels), config.dtype

    @classmethod
    def load_backends(cls) -> tuple[Any, Any]:
        from .convolution import ConvolutionRecorder, SlotConvolutions

        return ConvolutionRecorder, SlotConvolutions.for_step
