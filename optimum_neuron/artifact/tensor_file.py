# SPDX-License-Identifier: Apache-2.0
"""Safetensors files, written so that they can be mapped; headers are checked before a byte of a tensor is used."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

import numpy as np

from ..arrays import DTYPES, to_numpy
from .artifact import ArtifactError
from .schema import TEXT, Check, choice, listed, named, parse_object, record, shown, whole


if TYPE_CHECKING:
    from torch import Tensor

# The limit of the safetensors library.
_LARGEST_HEADER = 100_000_000
_MOST_DIMENSIONS = 16
_LENGTH_BYTES = 8
# Alignment of the bytes after a header: a page, so that vectors of a mapped file lie within cache lines.
_ALIGNMENT = 4096
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST = 2**63 - 1
_SIZE: Check = whole(0, _LARGEST)
_ENTRY = record({"dtype": choice(DTYPES), "shape": listed(_SIZE), "data_offsets": listed(_SIZE)}, closed=True)


class TensorLike(Protocol):
    """A tensor, or its description in a file of weights."""

    @property
    def dtype(self) -> object: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `start` and `stop` are offsets into the bytes after the header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def file_head(tensors: Iterable[tuple[str, np.dtype, tuple[int, ...]]]) -> bytes:
    """Return the bytes before those of tensors, given in the order of the file: the item size falls, so that all are aligned."""
    described: dict[str, object] = {}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        described[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in a file; in its own memory where that is contiguous."""
    return to_numpy(tensor.contiguous()).reshape(-1).view(np.uint8).data


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a file's header; raise ArtifactError where it is no safetensors file."""
    with path.open("rb") as file:
        head = read_head(file, path)
    return parse_head(head, path)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a small file, in memory of their own; raise ArtifactError where it is no safetensors file."""
    with path.open("rb") as file:
        head = read_head(file, path)
        return view_tensors(np.frombuffer(bytearray(file.read()), np.uint8), parse_head(head, path))


def view_tensors(block: np.ndarray, stored: Mapping[str, StoredTensor]) -> dict[str, np.ndarray]:
    """Return tensors as parts of the bytes after a file's header."""
    tensors = {}
    for name, each in stored.items():
        piece = block[each.start : each.stop]
        # Files of other writers may have heads of any length, and tensors in any order.
        aligned = piece.ctypes.data % each.dtype.itemsize == 0
        tensors[name] = (piece if aligned else piece.copy()).view(each.dtype).reshape(each.shape)
    return tensors


def read_head(file: BinaryIO | mmap, path: Path) -> bytes:
    """Return the header's length and the header; raise ArtifactError where the file has fewer bytes."""
    head = file.read(_LENGTH_BYTES)
    length = int.from_bytes(head, "little")
    if len(head) < _LENGTH_BYTES or length > min(path.stat().st_size - _LENGTH_BYTES, _LARGEST_HEADER):
        raise ArtifactError(
            f"{path} is no safetensors file: its header claims {length:,} bytes; export the model again"
        )
    return head + file.read(length)


def parse_head(head: bytes, path: Path) -> dict[str, StoredTensor]:
    """Return the tensors that a file's head describes.

    Raises ArtifactError if it is no head, or its tensors are not all of the file's bytes, each of them once.
    """
    try:
        header = parse_object(head[_LENGTH_BYTES:])
        named(TEXT)("__metadata__", header.pop("__metadata__", {}))
        tensors = {name: _read_entry(name, entry) for name, entry in header.items()}
        _check_places(tensors, path.stat().st_size - len(head))
    except ValueError as error:
        raise ArtifactError(f"{path} has a header that cannot be read: {error}; export the model again") from error
    return tensors


def _read_entry(name: str, entry: object) -> StoredTensor:
    what = f"tensor {shown(name)}"
    _ENTRY(what, entry)
    assert isinstance(entry, dict)
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], DTYPES[entry["dtype"]]
    countable = math.prod(max(size, 1) for size in shape) * dtype.itemsize <= _LARGEST
    if len(offsets) != 2 or len(shape) > _MOST_DIMENSIONS or not countable:
        raise ValueError(f"{what} has the shape {shown(shape)} and the offsets {shown(offsets)}")
    size = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != size:
        raise ValueError(
            f"{what} is at {shown(offsets)}, and {entry['dtype']} {shown(shape)} takes {shown(size)} bytes"
        )
    return StoredTensor(dtype, tuple(shape), *offsets)


def _check_places(tensors: dict[str, StoredTensor], size: int) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end:
            raise ValueError(f"tensor {shown(name)} begins at {tensor.start:,}, and the one before it ends at {end:,}")
        end = tensor.stop
    if end != size:
        raise ValueError(f"its tensors take {end:,} bytes, and the file holds {size:,}")
