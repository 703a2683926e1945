# SPDX-License-Identifier: Apache-2.0
"""The header of a GGUF file, read before anything is built by it: what it says must be in the file.

gguf's own reader trusts counts and lengths, and transformers builds its default model by a header that tells no sizes.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import StoredWeights


MAGIC = b"GGUF"
TOKENS_KEY = "tokenizer.ggml.tokens"
_VERSIONS = (2, 3)
_NEEDED = ("block_count", "embedding_length", "attention.head_count")
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself.

    Attributes:
        values: by key; of an array the number of its items.
        has_codes: whether a tensor of it is quantized.
    """

    values: dict[str, Any]
    stored: StoredWeights
    has_codes: bool

    def sizes(self) -> dict[str, Any]:
        """The sizes of the model, by their keys without the architecture."""
        prefix = f"{self.values['general.architecture']}."
        return {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}


def read_header(path: Path) -> GgufHeader:
    """Reads a file's header, and checks that the file holds what it announces.

    Raises:
        ValueError: the file is truncated or corrupt, or describes no model.
        RuntimeError: the package that reads such files is not installed.
    """
    sizes_of_types = _quantization_sizes(path)
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(
                f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}; download or copy it again"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = _Cursor(data).header(sizes_of_types)
            except ValueError as error:
                raise ValueError(
                    f"{path} is truncated or corrupt ({len(data):,} bytes: {error}); download or copy it again"
                ) from error
    _check_describes_model(path, header)
    return header


def _check_describes_model(path: Path, header: GgufHeader) -> None:
    if not header.stored.elements:
        raise ValueError(f"{path} holds no weights; name a file with the whole model")
    architecture = header.values.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(f"{path} names no general.architecture; name a file with the whole model")
    lacking = next((key for key in _NEEDED if f"{architecture}.{key}" not in header.values), None)
    if lacking is not None:
        raise ValueError(
            f"{path} lacks {architecture}.{lacking}, without which its model is not known; convert it again"
        )


def _quantization_sizes(path: Path) -> dict[int, tuple[int, int]]:
    """By type of tensors: elements of a block, and its bytes."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise RuntimeError(
            f"reading {path} needs gguf, which is not installed; pip install 'optimum-neuron-runtime[gguf]'"
        ) from error
    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


class _Cursor:
    """A place in a file's bytes; reading past their end is a ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._place = len(MAGIC)
        self._order = "<"
        version = self._number("I")
        if version & 0xFFFF == 0:  # written by a machine of the other byte order
            self._order, self._place = ">", len(MAGIC)
            version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, not one of {_VERSIONS}")

    def header(self, sizes_of_types: dict[int, tuple[int, int]]) -> GgufHeader:
        tensors, pairs = self._number("Q"), self._number("Q")
        values: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            values[key] = self._value(self._number("I"))
        elements, end, has_codes = 0, 0, False
        for _ in range(tensors):
            count, stop, block = self._tensor(sizes_of_types)
            elements, end, has_codes = elements + count, max(end, stop), has_codes or block > 1
        alignment = values.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        end += -(-self._place // alignment) * alignment
        if end > len(self._data):
            raise ValueError(f"its tensors end at byte {end:,}")
        return GgufHeader(values, StoredWeights(tensors, elements), has_codes)

    def _tensor(self, sizes_of_types: dict[int, tuple[int, int]]) -> tuple[int, int, int]:
        """The number of elements, where the tensor ends behind the header, and how many numbers a block of it has: one where they are plain."""
        name, dimensions = self._string(), self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        elements = math.prod(self._number("Q") for _ in range(dimensions))
        kind, offset = self._number("I"), self._number("Q")
        if kind not in sizes_of_types:
            raise ValueError(f"{name} is of the unknown type {kind}")
        block, size = sizes_of_types[kind]
        return elements, offset + elements // block * size, block

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise ValueError(f"a value is of the unknown type {kind}")
        kind, count = self._number("I"), self._number("Q")
        if kind in _NUMBERS:
            self._skip(count * struct.calcsize(_NUMBERS[kind]))
        elif kind == _STRING:
            for _ in range(count):
                self._skip(self._number("Q"))
        else:
            raise ValueError(f"the items of an array are of the type {kind}")
        return count

    def _number(self, form: str) -> Any:
        start = self._place
        self._skip(struct.calcsize(form))
        return struct.unpack_from(self._order + form, self._data, start)[0]

    def _string(self) -> str:
        length = self._number("Q")
        start = self._place
        self._skip(length)
        return self._data[start : self._place].decode("utf-8", "replace")

    def _skip(self, count: int) -> None:
        self._place += count
        if self._place > len(self._data):
            raise ValueError(f"what its header names ends at byte {self._place:,}")
