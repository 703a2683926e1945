# SPDX-License-Identifier: Apache-2.0
"""The interface of a quantized checkpoint: the names of its quantized weights, and each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from ...step.features.codes.weight import QuantizedWeight
from .stored import FormatWeight
from .tensors import TensorFiles


class CheckpointFormat(ABC):
    """A quantized checkpoint. Weights have the names that they have in an unquantized one, such as `...q_proj.weight`.

    Attributes:
        layers: names of the quantized weights.
        plain: names of all other tensors, as the checkpoint calls them.
        notices: a sentence for the user about each setting that is not followed.
    """

    layers: tuple[str, ...]
    plain: tuple[str, ...]
    notices: tuple[str, ...] = ()

    @abstractmethod
    def read_codes(self, name: str) -> QuantizedWeight:
        """Return a weight: its `dequantize()` is `self.dequantize(name)` to the bit.

        Raises:
            NotKeptError: there is none; the weight can be dequantized.
            ValueError: the checkpoint is damaged.
        """

    @abstractmethod
    def dequantize(self, name: str) -> Tensor:
        """Return `[..., outputs, inputs]` float32 by the definition of the format; raise ValueError for a damaged checkpoint."""

    @abstractmethod
    def read_plain(self, name: str) -> Tensor:
        """Return a tensor that is not quantized."""


class SafetensorsFormat(CheckpointFormat):
    """A quantized checkpoint in safetensors files, which stay mapped.

    Args:
        parts: names of a weight's tensors by part, by the weight's name.
        left_out: tensors of quantized layers that nothing reads.
    """

    def __init__(
        self,
        files: TensorFiles,
        parts: Mapping[str, Mapping[str, str]],
        *,
        left_out: tuple[str, ...] = (),
        notices: tuple[str, ...] = (),
    ) -> None:
        self._files = files
        self._parts = parts
        self.notices = notices
        used = {name for tensors in parts.values() for name in tensors.values()} | set(left_out)
        self.layers = tuple(parts)
        self.plain = tuple(sorted(name for name in files.names if name not in used))
        self._check(used)

    def _check(self, used: set[str]) -> None:
        source = self._files.source
        both = next((name for name in self._parts if name in self._files.names and name not in used), None)
        if both is not None:
            raise ValueError(f"{source} holds {both} plain and quantized; download or copy the checkpoint again")
        coded = next((name for name in self.plain if _is_coded(name, self._files.dtype(name))), None)
        if coded is not None:
            raise ValueError(
                f"{source} holds {coded} as {self._files.dtype(coded)} without what its codes stand for; download or copy the "
                f"checkpoint again"
            )
        if not self._parts:
            raise ValueError(
                f"{source} names a quantization in its config and holds no quantized weights; remove quantization_config from "
                f"config.json, or download the checkpoint again"
            )

    def read_codes(self, name: str) -> QuantizedWeight:
        return self._stored_weight(name).quantized()

    def dequantize(self, name: str) -> Tensor:
        return self._stored_weight(name).dequantize()

    def read_plain(self, name: str) -> Tensor:
        return self._files.read_tensor(name)

    @abstractmethod
    def _stored_weight(self, name: str) -> FormatWeight: ...


def _is_coded(name: str, dtype: str) -> bool:
    """Return whether a tensor's type is none of plain numbers."""
    return dtype.startswith(("F8", "F4", "F6")) or (name.endswith("weight") and "F" not in dtype)
