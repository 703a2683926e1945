# SPDX-License-Identifier: Apache-2.0
"""Read-only memory of mapped weights that becomes this process's own where something writes to it."""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


_IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__ipow__"})  # fmt: skip
# Address and size of each mapping, while it is there.
_mappings: dict[int, int] = {}


def map_read_only(descriptor: int) -> mmap.mmap:
    """A file's content, which stays as it is whatever is written to this memory."""
    memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch tells that the memory cannot be written to
        address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
    _mappings[address] = len(memory)
    weakref.finalize(memory, _mappings.pop, address, None)
    return memory


class WritableWhereWritten(TorchFunctionMode):
    """Within it, code of a model may write to weights that are mapped, as some rescale theirs: the pages of these tensors become its own first."""

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
    done = _libc().mprotect(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.PROT_READ | mmap.PROT_WRITE)
    if done:
        number = ctypes.get_errno()
        raise OSError(number, f"a mapped weight cannot be written to: {os.strerror(number)}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
