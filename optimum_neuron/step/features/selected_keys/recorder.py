# SPDX-License-Identifier: Apache-2.0
"""The backend that records which index keys layers keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....errors import UnsupportedModelError
from .index_keys import AskedKeys, KeySource


@dataclass
class IndexRecorder:
    """An index backend that only records how layers select keys."""

    found: list[Any]
    make_state: Callable[..., Any]

    def keep_index(self, layer_idx: int, keys: Tensor) -> KeySource:
        if any(each.layer_idx == layer_idx for each in self.found):
            raise UnsupportedModelError(f"layer {layer_idx} keeps several sets of index keys")
        return AskedKeys(
            lambda always, width: self.found.append(self.make_state(layer_idx, keys.shape[1], always, width))
        )
