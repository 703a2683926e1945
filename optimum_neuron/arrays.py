# SPDX-License-Identifier: Apache-2.0
"""Tensors on the host as arrays of numpy, and the same memory as tensors of torch. Imports torch where these are asked for."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import ml_dtypes as ml_dtypes  # from here on numpy knows bfloat16 and float8_e4m3fn by name
import numpy as np


if TYPE_CHECKING:
    from torch import Tensor

# Types by their names in safetensors files.
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("float64"), "F32": np.dtype("float32"), "F16": np.dtype("float16"), "BF16": np.dtype("bfloat16"),
    "I64": np.dtype("int64"), "I32": np.dtype("int32"), "I16": np.dtype("int16"), "I8": np.dtype("int8"), "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"), "F8_E4M3": np.dtype("float8_e4m3fn"),
}  # fmt: skip
# dtype.isbuiltin of a type that numpy got from ml_dtypes.
_ADDED = 2


def dtype_name(dtype: object) -> str:
    """Return the name of a type of numpy or torch."""
    return str(dtype).removeprefix("torch.")


def as_bits(array: np.ndarray) -> np.ndarray:
    """Return the same memory as whole numbers where numpy computes and copies its type one element at a time."""
    return array.view(f"i{array.itemsize}") if array.dtype.isbuiltin == _ADDED else array


def to_torch(array: np.ndarray) -> Tensor:
    """Return a tensor in an array's memory."""
    import torch

    tensor = torch.from_numpy(as_bits(array))
    return tensor.view(getattr(torch, array.dtype.name)) if array.dtype.isbuiltin == _ADDED else tensor


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return an array in the memory of a tensor on the CPU."""
    dtype, tensor = np.dtype(dtype_name(tensor.dtype)), tensor.detach()
    if dtype.isbuiltin != _ADDED:
        return tensor.numpy()
    import torch

    return tensor.view(torch.int8 if dtype.itemsize == 1 else torch.int16).numpy().view(dtype)


def give_back_heap() -> None:
    """Give the system the memory that this process freed: glibc keeps that of large arrays between blocks in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
