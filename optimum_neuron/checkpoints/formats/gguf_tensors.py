# SPDX-License-Identifier: Apache-2.0
"""The numbers of a GGUF file's tensors."""

from __future__ import annotations

import numpy as np

from ..gguf import GgufHeader


# Types of plain numbers, as numpy has them; it lacks bfloat16.
_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
PLAIN_KINDS = (*_PLAIN, "BF16")


def kind_of(header: GgufHeader, name: str) -> str:
    """A tensor's type, as gguf calls it."""
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(header.tensors[name].kind).name


def read_bytes(header: GgufHeader, name: str) -> np.ndarray:
    """`[..., outputs, bytes of an output]` uint8, mapped from the file."""
    tensor = header.tensors[name]
    rows = tensor.shape[:-1]
    width = tensor.size // max(1, int(np.prod(rows, dtype=np.int64)))
    return np.asarray(
        np.memmap(header.path, mode="r", dtype=np.uint8, offset=tensor.start, shape=(*rows, width))
        if tensor.size
        else np.empty((*rows, width), np.uint8)
    )


def read_values(header: GgufHeader, name: str) -> np.ndarray:
    """A tensor in float32, by gguf's own function where it is of codes.

    Raises:
        ValueError: it is of a type that stands for no weights.
    """
    from gguf.quants import GGMLQuantizationType, dequantize

    kind, stored = kind_of(header, name), read_bytes(header, name)
    if kind in _PLAIN:
        return stored.view(_PLAIN[kind]).astype(np.float32)
    if kind.startswith("I") and kind[1:].isdigit():
        raise ValueError(f"{header.path}: {name} is of the type {kind}, whole numbers; a weight is not")
    try:
        return np.asarray(dequantize(stored, GGMLQuantizationType(header.tensors[name].kind)), dtype=np.float32)
    except NotImplementedError as error:
        raise ValueError(
            f"{header.path}: {name} is of the type {kind}, which the installed gguf does not read; update gguf, or convert the "
            f"file to another type"
        ) from error
