# SPDX-License-Identifier: Apache-2.0
"""Tensors of safetensors files as parts of the mapped files: they take no memory of their own.

A private mapping that could be written to would count as memory that its process may need (RLIMIT_DATA), and the system refuses one that
is larger than all memory, however little of it is ever touched.
"""

from __future__ import annotations

import json
import math
import mmap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import modeling_utils

from .writable import WritableWhereWritten, map_read_only


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
# By the names that configs give them.
NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_LENGTH_BYTES = 8


def map_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, whose header others have checked. Who writes to one outside of `WritableWhereWritten` is ended by the system.

    Raises:
        KeyError: one is of a type that is none of `DTYPES`.
        OSError: the file cannot be mapped.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        entries = json.loads(file.read(length))
        memory = map_read_only(file.fileno())
    entries.pop("__metadata__", None)
    return {name: _view(memory, _LENGTH_BYTES + length, entry) for name, entry in entries.items()}


def _view(memory: mmap.mmap, first: int, entry: dict[str, Any]) -> Tensor:
    dtype, shape, start = DTYPES[entry["dtype"]], entry["shape"], first + entry["data_offsets"][0]
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch tells that the memory cannot be written to
        size = math.prod(shape) * dtype.itemsize
        piece = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
    # Files of other writers may have heads of any length.
    return (piece if piece.data_ptr() % dtype.itemsize == 0 else piece.clone()).view(dtype).view(shape)


class _MappedSlice:
    """What `safe_open(...).get_slice` gives, of one of these tensors."""

    def __init__(self, described: Any, tensor: Tensor) -> None:
        self._described, self._tensor = described, tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return str(self._described.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


class _MappedFile:
    """What `safe_open` gives, with these tensors."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self._file, self._tensors = safe_open(path, framework="np"), tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _MappedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> _MappedSlice:
        return _MappedSlice(self._file.get_slice(name), self._tensors[name])


def _open(path: Any, framework: str = "pt", **options: Any) -> Any:
    """As `safe_open`, which opens what has types that are not known here."""
    if framework == "pt":
        try:
            return _MappedFile(path, map_tensors(Path(path)))
        except KeyError:
            pass
    return safe_open(path, framework=framework, **options)


@contextmanager
def reading_mapped_files() -> Iterator[None]:
    """Within it, transformers reads the safetensors files of checkpoints as `map_tensors` does.

    Tensors that a model takes as they are then lie in the files.
    """
    original = modeling_utils.safe_open
    modeling_utils.safe_open = _open
    try:
        with WritableWhereWritten():
            yield
    finally:
        modeling_utils.safe_open = original
