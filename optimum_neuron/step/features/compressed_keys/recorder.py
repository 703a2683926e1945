# SPDX-License-Identifier: Apache-2.0
"""The backend that records which compressed keys layers keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....errors import UnsupportedModelError
from .compression import CompressingLayer, GroupSource, GroupWindows


# Groups of tokens that a recorded layer makes keys of.
_ASKED_WINDOWS = 2


@dataclass
class CompressionRecorder:
    """A compression backend that only records which keys layers make."""

    found: list[Any]
    make_state: Callable[..., Any]

    def take_windows(self, layer: CompressingLayer, index: int, values: Tensor, gates: Tensor) -> GroupWindows:
        width = values.shape[-1] + gates.shape[-1]
        self.found.append(self.make_state(layer.layer_idx, index, layer.rate, spans=1, width=width, key_dim=0))
        first = torch.zeros(_ASKED_WINDOWS, dtype=torch.int32)
        values, gates = (each.new_zeros((1, _ASKED_WINDOWS * layer.rate, each.shape[-1])) for each in (values, gates))
        return GroupWindows(values, gates, first)

    def add_overlap(self, layer: CompressingLayer, index: int) -> None:
        self._change_state(layer, index, spans=2)

    def keep_keys(self, layer: CompressingLayer, index: int, keys: Tensor) -> GroupSource:
        if len(keys) != _ASKED_WINDOWS:
            raise UnsupportedModelError(
                f"layer {layer.layer_idx} makes {len(keys)} keys of {_ASKED_WINDOWS} groups of {layer.rate} tokens"
            )
        self._change_state(layer, index, key_dim=keys.shape[1])
        return GroupSource()

    def _change_state(self, layer: CompressingLayer, index: int, **sizes: int) -> None:
        places = [(each.layer_idx, each.index) for each in self.found]
        place = places.index((layer.layer_idx, index))
        self.found[place] = replace(self.found[place], **sizes)
