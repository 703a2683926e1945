# SPDX-License-Identifier: Apache-2.0
"""The backend that records which keys and values layers keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..layer_numbers import LayerCalls
from .call import AttentionCall


@dataclass
class KeyRecorder:
    """An attention backend that only records which keys and values layers keep."""

    found: list[Any]
    make_state: Callable[..., Any]
    calls: LayerCalls = field(default_factory=LayerCalls)

    def attend(self, call: AttentionCall) -> Tensor:
        self.store(call.layer_idx, call.key, call.value)
        return call.query.new_zeros((1, call.query.shape[2], call.query.shape[1], call.value.shape[-1]))

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        number = self.calls.number_call(layer_idx)
        self.found.append(self.make_state(number, key.shape[1], key.shape[-1], value.shape[-1]))
        return key, value
