# SPDX-License-Identifier: Apache-2.0
"""Files without a name for large tensors that are made while a model is loaded: the system writes them out where memory is short.

An unchanged tensor lies in its checkpoint's file. One that is cast, joined, dequantized or rounded to codes has memory of its own, and all
of them would be a second copy of the model. Pages of files are given back as soon as a module has run, or a tensor was written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module


# Smaller ones are not worth a file.
_LEAST = 1 << 20
_MAPPINGS = Path("/proc/self/maps")
_OPEN_FILES = Path("/proc/self/fd")
_FILE, _PRIVATE = "file", "private"
# Makes transformers make one tensor after another, in place of all at once by other threads.
_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"

_folder: ContextVar[Path | None] = ContextVar("where files for large tensors are", default=None)


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
            stack.enter_context(_in_turn())
        yield


@contextmanager
def _in_turn() -> Iterator[None]:
    before = os.environ.get(_IN_TURN)
    os.environ[_IN_TURN] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_IN_TURN]
        else:
            os.environ[_IN_TURN] = before


def in_file(tensor: Tensor) -> Tensor:
    """Return the same numbers in a file that is gone when the tensor is; a small tensor or one in a file stays as it is.

    Raises:
        OSError: the disk is full.
    """
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
