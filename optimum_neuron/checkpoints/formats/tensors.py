# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint's safetensors files, mapped and read one by one."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..files import INDEX_NAME, SINGLE_NAME, read_object, read_shapes, weight_files


DOWNLOAD = "download or copy the checkpoint again"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class TensorFiles:
    """A checkpoint's tensors by name. What is read lies in the mapped files, which stay open as long as this object."""

    def __init__(self, folder: Path, source: str) -> None:
        """Opens all safetensors files of a folder.

        Args:
            source: what the user named, for messages.

        Raises:
            FileNotFoundError: there are no weights, or a file that the index names is missing.
            ValueError: a file is corrupt, two hold the same tensor, or one that the index names is in none.
        """
        self.source = source
        self._files: dict[str, Any] = {}
        self._described: dict[str, tuple[list[int], str]] = {}
        for path in weight_files(folder, source):
            described = read_shapes(path)
            twice = next((name for name in described if name in self._described), None)
            if twice is not None:
                raise ValueError(f"{source} holds {twice} twice, in {path.name} and another file; {DOWNLOAD}")
            file = safe_open(path, "pt")
            self._files |= dict.fromkeys(described, file)
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
        """The type of a tensor as safetensors calls it, such as F8_E4M3."""
        return self._described[name][1]

    def read(self, name: str, *dtypes: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        """A tensor, of one of some types where they are given.

        Raises:
            ValueError: it has another type or shape, or no elements.
        """
        found = tuple(self._described[name][0])
        if not math.prod(found) or (shape is not None and found != shape):
            raise ValueError(
                f"{self.source}: {name} has the shape {list(found)}, and is to have "
                f"{'elements' if shape is None else list(shape)}; {DOWNLOAD}"
            )
        tensor: Tensor = self._files[name].get_tensor(name)
        if dtypes and tensor.dtype not in dtypes:
            raise ValueError(
                f"{self.source}: {name} is {tensor.dtype}, and is to be {' or '.join(map(str, dtypes))}; {DOWNLOAD}"
            )
        return tensor


def by_module(files: TensorFiles, parts: Collection[str]) -> dict[str, dict[str, str]]:
    """By module, the names of those of its tensors that are one of `parts`, by part."""
    found: dict[str, dict[str, str]] = {}
    for name in sorted(files.names):
        module, _, part = name.rpartition(".")
        if part in parts:
            found.setdefault(module, {})[part] = name
    return found


def check_parts(files: TensorFiles, module: str, found: Collection[str], needed: Collection[str]) -> None:
    """Raises ValueError where a layer lacks one of the tensors that its format has."""
    lacking = [part for part in needed if part not in found]
    if lacking:
        raise ValueError(
            f"{files.source}: {module} has {', '.join(sorted(found))} and lacks {', '.join(lacking)}; {DOWNLOAD}"
        )
