# SPDX-License-Identifier: Apache-2.0
"""The tensors of a quantized checkpoint's files, and the interface that all formats of quantized weights have."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ...step.features.codes.weight import QuantizedWeight
from ..files import INDEX_NAME, SINGLE_NAME, Shapes, read_object, shapes_by_file
from .stored import DOWNLOAD, FormatWeight


FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class TensorFiles:
    """A checkpoint's tensors by name, in mapped files that stay open as long as this object; raises as `shapes_by_file`."""

    def __init__(self, folder: Path, source: str) -> None:
        self.source = source
        self._files: dict[str, Any] = {}
        self._described: Shapes = {}
        for path, described in shapes_by_file(folder, source).items():
            self._files |= dict.fromkeys(described, safe_open(path, "pt"))
            self._described |= described
        if not (folder / SINGLE_NAME).is_file():
            indexed = read_object(folder / INDEX_NAME)["weight_map"]
            lacking = next((name for name in indexed if name not in self._described), None)
            if lacking is not None:
                raise ValueError(f"{source} lacks {lacking}, which {INDEX_NAME} names; {DOWNLOAD}")

    @property
    def names(self) -> Collection[str]:
        return self._described.keys()

    def dtype(self, name: str) -> str:
        """Return the type of a tensor as safetensors calls it, such as F8_E4M3."""
        return self._described[name][1]

    def read_tensor(
        self, name: str, *dtypes: torch.dtype, shape: tuple[int, ...] | None = None, rank: int | None = None
    ) -> Tensor:
        """Return a tensor; raise ValueError where it has another type, shape or number of dimensions, or no elements."""
        found = tuple(self._described[name][0])
        if not math.prod(found) or (shape is not None and found != shape) or rank not in (None, len(found)):
            wanted = list(shape) if shape is not None else "elements" if rank is None else f"{rank} dimensions"
            raise ValueError(f"{self.source}: {name} has the shape {list(found)}, and is to have {wanted}; {DOWNLOAD}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if dtypes and tensor.dtype not in dtypes:
            wanted = " or ".join(map(str, dtypes))
            raise ValueError(f"{self.source}: {name} is {tensor.dtype}, and is to be {wanted}; {DOWNLOAD}")
        return tensor

    def parts_by_weight(
        self, needed: Collection[str], others: Collection[str] = (), *, separator: str = ".", own: str = ".weight"
    ) -> dict[str, dict[str, str]]:
        """Return tensors by part of a weight, with `own` at the end of its name; raise ValueError where a needed one is lacking."""
        found: dict[str, dict[str, str]] = {}
        for name in sorted(self.names):
            module, _, part = name.rpartition(separator)
            if module and (part in needed or part in others):
                found.setdefault(f"{module}{own}", {})[part] = name
        for weight, parts in found.items():
            self.check_parts(weight, parts, needed)
        return found

    def check_parts(self, weight: str, found: Collection[str], needed: Collection[str]) -> None:
        """Raise ValueError where a weight lacks one of the tensors that its format has."""
        lacking = ", ".join(part for part in needed if part not in found)
        if lacking:
            raise ValueError(f"{self.source}: {weight} has {', '.join(sorted(found))} and lacks {lacking}; {DOWNLOAD}")


class CheckpointFormat(ABC):
    """A quantized checkpoint: names of quantized weights and of all others, and a notice of each setting that is not followed.

    Quantized weights have the names that they have in an unquantized checkpoint, such as `...q_proj.weight`.
    """

    layers: tuple[str, ...]
    plain: tuple[str, ...]
    notices: tuple[str, ...] = ()

    @abstractmethod
    def read_codes(self, name: str) -> QuantizedWeight:
        """Return a weight with `dequantize()` as `self.dequantize(name)` to the bit; raise NotKeptError where there is none."""

    @abstractmethod
    def dequantize(self, name: str) -> Tensor:
        """Return `[..., outputs, inputs]` float32 by the definition of the format; raise ValueError for a damaged checkpoint."""

    @abstractmethod
    def read_plain(self, name: str) -> Tensor:
        """Return a tensor that is not quantized."""


class SafetensorsFormat(CheckpointFormat):
    """A quantized checkpoint in safetensors files, which stay mapped, with a weight's tensors by part; nothing reads those `left_out`."""

    def __init__(
        self,
        files: TensorFiles,
        parts: Mapping[str, Mapping[str, str]],
        *,
        left_out: tuple[str, ...] = (),
        notices: tuple[str, ...] = (),
    ) -> None:
        self._files, self._parts, self.notices = files, parts, notices
        used = {name for tensors in parts.values() for name in tensors.values()} | set(left_out)
        self.layers = tuple(parts)
        self.plain = tuple(sorted(name for name in files.names if name not in used))
        both = next((name for name in parts if name in files.names and name not in used), None)
        if both is not None:
            raise ValueError(f"{files.source} holds {both} plain and quantized; {DOWNLOAD}")
        for name in self.plain:
            dtype = files.dtype(name)
            if dtype.startswith(("F8", "F4", "F6")) or (name.endswith("weight") and "F" not in dtype):
                raise ValueError(f"{files.source} holds {name} as {dtype} without what codes stand for; {DOWNLOAD}")
        if not parts:
            raise ValueError(
                f"{files.source} names a quantization in its config and holds no quantized weights; remove quantization_config from "
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
