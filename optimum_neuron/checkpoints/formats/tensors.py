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

from ..files import INDEX_NAME, SINGLE_NAME, Shapes, read_object, shapes_by_file


DOWNLOAD = "download or copy the checkpoint again"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class TensorFiles:
    """A checkpoint's tensors by name. They lie in the mapped files, which stay open as long as this object."""

    def __init__(self, folder: Path, source: str) -> None:
        """Open all safetensors files of a folder.

        Raises:
            FileNotFoundError: there are no weights, or a file that the index names is missing.
            ValueError: a file is corrupt, two hold the same tensor, or one that the index names is in none.
        """
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
            raise ValueError(
                f"{self.source}: {name} is {tensor.dtype}, and is to be {' or '.join(map(str, dtypes))}; {DOWNLOAD}"
            )
        return tensor


def parts_by_weight(
    files: TensorFiles, needed: Collection[str], others: Collection[str] = ()
) -> dict[str, dict[str, str]]:
    """Return the names of a weight's tensors by part, by weight; raise ValueError where a needed one is lacking."""
    found: dict[str, dict[str, str]] = {}
    for name in sorted(files.names):
        module, _, part = name.rpartition(".")
        if part in needed or part in others:
            found.setdefault(f"{module}.weight", {})[part] = name
    for weight, parts in found.items():
        check_parts(files, weight, parts, needed)
    return found


def check_parts(files: TensorFiles, module: str, found: Collection[str], needed: Collection[str]) -> None:
    """Raise ValueError where a layer lacks one of the tensors that its format has."""
    lacking = [part for part in needed if part not in found]
    if lacking:
        raise ValueError(
            f"{files.source}: {module} has {', '.join(sorted(found))} and lacks {', '.join(lacking)}; {DOWNLOAD}"
        )
