# SPDX-License-Identifier: Apache-2.0
"""What a quantized checkpoint is asked: which weights it has quantized, and each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from ...step.features.codes.weight import QuantizedWeight
from .stored import StoredWeight
from .tensors import TensorFiles


class CheckpointFormat(ABC):
    """A quantized checkpoint. Weights have the names that they have in an unquantized one, such as `...q_proj.weight`.

    Attributes:
        layers: names of the quantized weights.
        plain: names of all other tensors, as the checkpoint calls them.
        notices: what of the checkpoint is not followed, a sentence each, for the user.
    """

    layers: tuple[str, ...]
    plain: tuple[str, ...]
    notices: tuple[str, ...] = ()

    @abstractmethod
    def read(self, name: str) -> QuantizedWeight:
        """A weight whose `dequantize()` is `self.dequantize(name)` to the bit.

        Raises:
            NotKeptError: there is none; the weight can be dequantized.
            ValueError: the checkpoint is damaged.
        """

    @abstractmethod
    def dequantize(self, name: str) -> Tensor:
        """`[..., outputs, inputs]` float32: what the format says that a weight stands for.

        Raises:
            ValueError: the checkpoint is damaged.
        """

    @abstractmethod
    def read_plain(self, name: str) -> Tensor:
        """A tensor that is not quantized."""


class SafetensorsFormat(CheckpointFormat):
    """One whose tensors are in safetensors files, which stay mapped.

    Args:
        parts: by name of a weight the names of its tensors, by part.
        left_out: tensors that belong to quantized layers, and that nothing reads.
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

    def read(self, name: str) -> QuantizedWeight:
        return self._stored(name).quantized()

    def dequantize(self, name: str) -> Tensor:
        return self._stored(name).dequantize()

    def read_plain(self, name: str) -> Tensor:
        return self._files.read(name)

    @abstractmethod
    def _stored(self, name: str) -> StoredWeight: ...


def _is_coded(name: str, dtype: str) -> bool:
    """Whether a tensor by its type is none of plain numbers."""
    return dtype.startswith(("F8", "F4", "F6")) or (name.endswith("weight") and "F" not in dtype)
