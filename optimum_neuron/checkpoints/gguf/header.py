# SPDX-License-Identifier: Apache-2.0
"""The header of a GGUF file, checked against the file before anything is built by it.

gguf's own reader trusts counts and lengths, and takes the last of several values of a key.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..files import StoredWeights


MAGIC = b"GGUF"
TOKENS_KEY = "tokenizer.ggml.tokens"
ARCHITECTURE_KEY = "general.architecture"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT, _STRING, _ARRAY = 6, 8, 9
# Types of plain numbers, as numpy has them; it lacks bfloat16.
_NUMPY_KINDS = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
PLAIN_KINDS = (*_NUMPY_KINDS, "BF16")
# Longer arrays are only counted, such as a vocabulary; a model has fewer layers, and fewer sizes of each.
_MOST_ITEMS = 4096
_LONGEST_NAME = 200


@dataclass(frozen=True)
class Items:
    """An array of strings or a long one, which is not read."""

    count: int


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place in a file, in bytes: `shape` has outputs before inputs, and `kind` is gguf's number of the type."""

    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


@dataclass(frozen=True)
class GgufHeader:
    """A GGUF file's values by key and tensors by name; an array is a tuple of numbers, or `Items`."""

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.values[ARCHITECTURE_KEY])

    @property
    def stored(self) -> StoredWeights:
        return StoredWeights(len(self.tensors), sum(math.prod(tensor.shape) for tensor in self.tensors.values()))

    @property
    def has_codes(self) -> bool:
        return any(self.kind(name) not in PLAIN_KINDS for name in self.tensors)

    def kind(self, name: str) -> str:
        """Return a tensor's type, as gguf calls it."""
        from gguf.constants import GGMLQuantizationType

        return GGMLQuantizationType(self.tensors[name].kind).name

    def read_bytes(self, name: str) -> np.ndarray:
        """Return a tensor `[..., outputs, bytes of an output]` uint8, mapped from the file."""
        tensor = self.tensors[name]
        shape = (*tensor.shape[:-1], tensor.size // max(1, math.prod(tensor.shape[:-1])))
        if not tensor.size:
            return np.empty(shape, np.uint8)
        return np.asarray(np.memmap(self.path, mode="r", dtype=np.uint8, offset=tensor.start, shape=shape))

    def read_values(self, name: str) -> np.ndarray:
        """Return a tensor in float32, by gguf's own function for codes; raise ValueError for a type that gguf cannot read."""
        from gguf.quants import GGMLQuantizationType, dequantize

        kind, stored = self.kind(name), self.read_bytes(name)
        if kind in _NUMPY_KINDS:
            return stored.view(_NUMPY_KINDS[kind]).astype(np.float32)
        try:
            return np.asarray(dequantize(stored, GGMLQuantizationType[kind]), dtype=np.float32)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: {name} has the type {kind}, which gguf makes no weights of; convert the file to another type"
            ) from error

    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the model, by their keys without the architecture."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}


def read_header(path: Path) -> GgufHeader:
    """Read a file's header; raise ValueError where the file is corrupt or has no model, RuntimeError where gguf is not installed."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise RuntimeError(
            f"reading {path} needs gguf, which is not installed; pip install 'optimum-neuron-runtime[gguf]'"
        ) from error
    sizes_of_types = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    with path.open("rb") as file:
        magic, version = file.read(len(MAGIC)), file.read(4)
        if magic != MAGIC:
            raise ValueError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}; download it again")
        if int.from_bytes(version, "big") in _VERSIONS:
            raise ValueError(f"{path} was written by a machine of the other byte order; convert it again here")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = _Cursor(data, sizes_of_types).read_header(path)
            except ValueError as error:
                raise ValueError(
                    f"{path} is truncated or corrupt ({len(data):,} bytes: {error}); download it again"
                ) from error
    if not header.stored.elements:
        raise ValueError(f"{path} holds no weights; name a file with the whole model")
    architecture = header.values.get(ARCHITECTURE_KEY)
    if not isinstance(architecture, str) or not architecture.isprintable() or len(architecture) > _LONGEST_NAME:
        raise ValueError(f"{path} names no {ARCHITECTURE_KEY}; name a file with the whole model")
    return header


class _Cursor:
    """A place in a file's bytes; reading past their end is a ValueError. Types of tensors have blocks of some elements and bytes."""

    def __init__(self, data: mmap.mmap, sizes_of_types: dict[int, tuple[int, int]]) -> None:
        self._data, self._sizes_of_types = data, sizes_of_types
        self._place = len(MAGIC)

    def read_header(self, path: Path) -> GgufHeader:
        version = self._read_number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, not one of {_VERSIONS}")
        tensors, pairs = self._read_number("Q"), self._read_number("Q")
        values = self._read_named(pairs, lambda _: self._read_value(self._read_number("I")))
        found = self._read_named(tensors, self._read_tensor)
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        first = -(-self._place // alignment) * alignment
        end = max((first + tensor.start + tensor.size for tensor in found.values()), default=0)
        if end > len(self._data):
            raise ValueError(f"its tensors end at byte {end:,}")
        placed = {name: replace(tensor, start=first + tensor.start) for name, tensor in found.items()}
        return GgufHeader(path, values, placed)

    def _read_named(self, count: int, read: Callable[[str], Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            start, name = self._place, self._read_string()
            if not name.isprintable() or len(name) > _LONGEST_NAME:  # messages show it
                raise ValueError(f"at byte {start:,} stands no name")
            if name in found:
                raise ValueError(f"it has {name} twice")
            found[name] = read(name)
        return found

    def _read_tensor(self, name: str) -> GgufTensor:
        dimensions = self._read_number("I")
        if dimensions > 4:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = tuple(self._read_number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self._read_number("I"), self._read_number("Q")
        if kind not in self._sizes_of_types:
            raise ValueError(f"{name} has the unknown type {kind}")
        block, size = self._sizes_of_types[kind]
        if not shape or shape[-1] % block:
            raise ValueError(f"{name} has the shape {list(shape)}, and blocks of {block} numbers")
        return GgufTensor(shape, kind, offset, math.prod(shape) // block * size)

    def _read_value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._read_string()
        if kind in _NUMBERS:
            return _shortest(kind, self._read_number(_NUMBERS[kind]))
        if kind != _ARRAY:
            raise ValueError(f"a value has the unknown type {kind}")
        kind, count = self._read_number("I"), self._read_number("Q")
        if kind in _NUMBERS and count <= _MOST_ITEMS:
            return tuple(_shortest(kind, self._read_number(_NUMBERS[kind])) for _ in range(count))
        if kind in _NUMBERS:
            self._skip_bytes(count * struct.calcsize(_NUMBERS[kind]))
        elif kind == _STRING:
            for _ in range(count):
                self._skip_bytes(self._read_number("Q"))
        else:
            raise ValueError(f"the items of an array have the type {kind}")
        return Items(count)

    def _read_number(self, form: str) -> Any:
        start = self._place
        self._skip_bytes(struct.calcsize(form))
        return struct.unpack_from(f"<{form}", self._data, start)[0]

    def _read_string(self) -> str:
        length = self._read_number("Q")
        start = self._place
        self._skip_bytes(length)
        return self._data[start : self._place].decode("utf-8", "replace")

    def _skip_bytes(self, count: int) -> None:
        self._place += count
        if self._place > len(self._data):
            raise ValueError(f"what its header names ends at byte {self._place:,}")


def _shortest(kind: int, value: Any) -> Any:
    """Return a number; a float32 becomes the shortest number that rounds to it, as it was written."""
    return float(str(np.float32(value))) if kind == _FLOAT else value
