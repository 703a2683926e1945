# SPDX-License-Identifier: Apache-2.0
"""The backend that records which convolutions layers keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....errors import UnsupportedModelError


@dataclass
class ConvolutionRecorder:
    """A convolution backend that only records which inputs layers keep."""

    found: list[Any]
    make_state: Callable[..., Any]

    def convolve(self, layer_idx: int, index: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kernel = weight.shape[-1]
        if kernel < 2:
            raise UnsupportedModelError(
                f"layer {layer_idx} keeps the inputs of a convolution with a kernel of {kernel}"
            )
        self._add_state(self.make_state(layer_idx, index, kernel - 1, inputs.shape[1]))
        return inputs

    def read_before(self, layer_idx: int, index: int, inputs: Tensor, past: int) -> Tensor:
        _, channels, tokens = inputs.shape
        self._add_state(self.make_state(layer_idx, index, past, channels))
        return inputs.new_zeros((tokens, channels, past))

    def _add_state(self, state: Any) -> None:
        if any((each.layer_idx, each.index) == (state.layer_idx, state.index) for each in self.found):
            raise UnsupportedModelError(f"layer {state.layer_idx} keeps inputs of several convolutions in one place")
        self.found.append(state)
