# SPDX-License-Identifier: Apache-2.0
"""Tensors of safetensors files as parts of the mapped files: they take no memory of their own.

A private mapping that could be written to would count as memory that its process may need (RLIMIT_DATA), and the system refuses one that
is larger than all memory, however little of it is ever touched.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import modeling_utils

from .. import arrays


DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype.name) for name, dtype in arrays.DTYPES.items()}
# By configs' names.
NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_LENGTH_BYTES = 8
_IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__ipow__"})  # fmt: skip
# Address and size of each mapping, while it is there.
_mappings: dict[int, int] = {}


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file with a checked header. Outside of `WritableWhereWritten` a write to one ends the process.

    Raises:
        KeyError: a type is none of `DTYPES`.
        OSError: the file cannot be mapped.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        entries = json.loads(file.read(length))
        memory = map_read_only(file.fileno())
    entries.pop("__metadata__", None)
    return {name: _view_tensor(memory, _LENGTH_BYTES + length, entry) for name, entry in entries.items()}


def _view_tensor(memory: mmap.mmap, first: int, entry: dict[str, Any]) -> Tensor:
    dtype, shape, start = DTYPES[entry["dtype"]], entry["shape"], first + entry["data_offsets"][0]
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the memory is read-only
        size = math.prod(shape) * dtype.itemsize
        piece = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
    # Files of other writers may have heads of any length.
    return (piece if piece.data_ptr() % dtype.itemsize == 0 else piece.clone()).view(dtype).view(shape)


class _MappedSlice:
    """A mapped tensor, as `safe_open(...).get_slice` gives it."""

    def __init__(self, described: Any, tensor: Tensor) -> None:
        self._described, self._tensor = described, tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return str(self._described.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


class _MappedFile:
    """A file of mapped tensors, as `safe_open` gives it."""

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
    """Open a file as `safe_open` does; it opens files with types that are not known here."""
    if framework == "pt":
        try:
            return _MappedFile(path, map_tensors(Path(path)))
        except KeyError:
            pass
    return safe_open(path, framework=framework, **options)


@contextmanager
def reading_mapped_files() -> Iterator[None]:
    """Have transformers read safetensors files as `map_tensors` does; unchanged tensors then lie in the files."""
    original = modeling_utils.safe_open
    modeling_utils.safe_open = _open
    try:
        with WritableWhereWritten():
            yield
    finally:
        modeling_utils.safe_open = original


def map_read_only(descriptor: int) -> mmap.mmap:
    """Map a file's content, which stays as it is whatever is written to this memory."""
    memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the memory is read-only
        address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
    _mappings[address] = len(memory)
    weakref.finalize(memory, _mappings.pop, address, None)
    return memory


class WritableWhereWritten(TorchFunctionMode):
    """A mode in which code of a model may write to mapped weights: their pages become the process's own first."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            _make_writable(args[0] if args else kwargs.get("input"))
        if "out" in kwargs:
            _make_writable(kwargs["out"])
        return func(*args, **kwargs)


def _make_writable(tensor: Any) -> None:
    if not isinstance(tensor, Tensor) or not _mappings:
        return
    storage = tensor.untyped_storage()
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if not any(address <= start < address + size for address, size in _mappings.items()):
        return
    page = mmap.PAGESIZE
    first = start // page * page
    done = _load_libc().mprotect(
        ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.PROT_READ | mmap.PROT_WRITE
    )
    if done:
        number = ctypes.get_errno()
        raise OSError(number, f"a mapped weight cannot be written to: {os.strerror(number)}")


def _load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
