# SPDX-License-Identifier: Apache-2.0
"""Tensors in files: those of a checkpoint's files take no memory of their own, and large ones that are made go to files without a name.

A private mapping that could be written to would count as memory of its process (RLIMIT_DATA), and tensors that are cast, joined, dequantized or
rounded to codes would be a second copy of the model. The system writes files without a name out where memory is short.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import tempfile
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from transformers import modeling_utils

from .. import arrays


DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype.name) for name, dtype in arrays.DTYPES.items()}
# By configs' names.
NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_LENGTH_BYTES = 8
_IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__ipow__"})  # fmt: skip
# Smaller ones are not worth a file.
_LEAST = 1 << 20
_MAPPINGS = Path("/proc/self/maps")
_OPEN_FILES = Path("/proc/self/fd")
_FILE, _PRIVATE = "file", "private"
# Makes transformers make one tensor after another, in place of all at once by other threads.
_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"
_folder: ContextVar[Path | None] = ContextVar("where files for large tensors are", default=None)
# Address and size of each mapping, while it is there.
_mappings: dict[int, int] = {}


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file with a checked header; raise KeyError for a type that is none of `DTYPES`.

    Outside of `WritableWhereWritten` a write to one ends the process.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        entries = json.loads(file.read(length))
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    address = _view_bytes(memory, 1).data_ptr()
    _mappings[address] = len(memory)
    weakref.finalize(memory, _mappings.pop, address, None)
    entries.pop("__metadata__", None)
    return {name: _view_tensor(memory, _LENGTH_BYTES + length, entry) for name, entry in entries.items()}


def _view_tensor(memory: mmap.mmap, first: int, entry: dict[str, Any]) -> Tensor:
    dtype, shape, start = DTYPES[entry["dtype"]], entry["shape"], first + entry["data_offsets"][0]
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    piece = _view_bytes(memory, math.prod(shape) * dtype.itemsize, start)
    # Files of other writers may have heads of any length.
    return (piece if piece.data_ptr() % dtype.itemsize == 0 else piece.clone()).view(dtype).view(shape)


def _view_bytes(memory: mmap.mmap, size: int, start: int = 0) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the memory is read-only
        return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)


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
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    libc, access = ctypes.CDLL(None, use_errno=True), mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(end - first), access):
        raise OSError(ctypes.get_errno(), f"a mapped weight cannot be written to: {os.strerror(ctypes.get_errno())}")


@contextmanager
def scratch_folder(folder: Path) -> Iterator[None]:
    """Have `in_file` and `tensors_in_files` put large tensors into hidden files of a folder."""
    token = _folder.set(folder if _MAPPINGS.is_file() and _OPEN_FILES.is_dir() else None)
    try:
        yield
    finally:
        _folder.reset(token)


@contextmanager
def tensors_in_files() -> Iterator[None]:
    """Put large tensors that modules get as parameters and buffers into files; without a `scratch_folder` nothing changes."""

    def move(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            moved = in_file(tensor.detach())
            if moved.data_ptr() != tensor.data_ptr():
                tensor.data = moved

    with ExitStack() as stack:
        if _folder.get() is not None:
            stack.callback(torch_module.register_module_parameter_registration_hook(move).remove)
            stack.callback(torch_module.register_module_buffer_registration_hook(move).remove)
            stack.callback(os.environ.update, {_IN_TURN: os.environ.get(_IN_TURN, "0")})
            os.environ[_IN_TURN] = "1"
        yield


def in_file(tensor: Tensor) -> Tensor:
    """Return the same numbers in a file that is gone when the tensor is; a small tensor or one in a file stays as it is."""
    folder = _folder.get()
    if folder is None or type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.nbytes < _LEAST:
        return tensor
    if _mapping_of(tensor.data_ptr()) is not None:
        return tensor
    contents = tensor.contiguous().flatten().view(torch.uint8)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(contents.numpy().data)
        file.flush()
        path = _OPEN_FILES / str(file.fileno())
        stored = torch.from_file(str(path), shared=True, size=contents.numel(), dtype=torch.uint8)
    return stored.view(tensor.dtype).view(tensor.shape)


@contextmanager
def giving_back() -> Iterator[None]:
    """Give back the pages of a module's large tensors after it has run; without a `scratch_folder` nothing changes."""

    def leave(module: nn.Module, *_: object) -> None:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                give_back(tensor.detach())

    with ExitStack() as hooks:
        if _folder.get() is not None:
            hooks.callback(torch_module.register_module_forward_hook(leave).remove)
        yield


def give_back(tensor: Tensor) -> None:
    """Take the pages of a large tensor in a file out of this process; the system keeps them as long as it has room for them."""
    if _folder.get() is None or type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.nbytes < _LEAST:
        return
    storage = tensor.untyped_storage()
    if _mapping_of(storage.data_ptr()) == _FILE:
        # Whole pages alone: of another tensor in the same page there may be numbers that no file has.
        first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if size > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _mapping_of(address: int) -> str | None:
    """Return the kind of file that memory belongs to: unchanged, or perhaps written to; None for memory of no file."""
    with _MAPPINGS.open("rb") as lines:
        for line in lines:
            bounds, flags, _, _, inode, *_ = line.split(None, 5)
            start, end = (int(bound, 16) for bound in bounds.split(b"-"))
            if start <= address < end:
                has_all = flags.endswith(b"s") or b"w" not in flags
                return None if int(inode) == 0 else _FILE if has_all else _PRIVATE
    return None
