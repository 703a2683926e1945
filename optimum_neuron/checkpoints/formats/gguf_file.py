# SPDX-License-Identifier: Apache-2.0
"""GGUF files: their blocks kept, under the names and in the row order of a transformers model.

What transformers does with a tensor of a file, such as to reorder the rows of a Llama's queries, is found by having it done
to the numbers of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...graphs.quantized.weight import QuantizedWeight
from ..gguf import read_header
from ..gguf_reads import GgufReads
from .format import CheckpointFormat
from .gguf_blocks import KINDS, repack
from .stored import PLAIN_REMEDY, NotKeptError


PLAIN_KINDS = ("F32", "F16", "BF16", "F64")
_MARKED_COLUMNS = 2


@dataclass(frozen=True)
class _Piece:
    """A tensor of the file, as a part of a weight.

    Attributes:
        places: `[rows]` int64: where its rows lie among those of the weight; None where they cannot be told.
        shape: of the weight, but for inputs.
    """

    tensor: Any
    places: Tensor | None = None
    shape: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        return str(self.tensor.tensor_type.name)


class GgufFile(CheckpointFormat):
    """A GGUF file, by the names of a model's parameters."""

    def __init__(self, path: Path, model: PreTrainedModel, reads: GgufReads) -> None:
        """Finds its tensors.

        Args:
            model: the transformers model that it holds the weights of; its parameters may be without memory.
            reads: by which the file is parsed once.

        Raises:
            ValueError: the file is truncated or corrupt, of the other byte order, or of an architecture whose tensors
                transformers does not read one by one: a NotKeptError.
        """
        from transformers import modeling_gguf_pytorch_utils as loading

        self._path = path
        architecture = read_header(path).values["general.architecture"]
        if _is_read_whole(architecture):
            raise NotKeptError(
                f"{path} is of the architecture {architecture}, whose blocks are not kept; {PLAIN_REMEDY}"
            )
        make = loading.TENSOR_PROCESSORS.get(architecture, loading.TensorProcessor)
        self._processor = make(config=model.config.to_dict())
        with reads.shared():
            import gguf

            reader = gguf.GGUFReader(str(path))  # as transformers calls it, whose reader is shared
            self._names: Mapping[str, str] = loading.get_gguf_hf_weights_map(model, self._processor)
        if reader.byte_order != "I":
            raise ValueError(
                f"{path} was written by a machine of the other byte order; convert it again on one like this"
            )
        self._pieces: dict[str, list[_Piece]] = {}
        for tensor in reader.tensors:
            for name, piece in self._placed(tensor):
                self._pieces.setdefault(name, []).append(piece)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(name for name, pieces in self._pieces.items() if not _is_plain(pieces))

    @property
    def plain(self) -> tuple[str, ...]:
        """As the model calls them. Those that it has no place for, such as tables of positions, are left out."""
        return tuple(name for name, pieces in self._pieces.items() if _is_plain(pieces))

    def read(self, name: str) -> QuantizedWeight:
        pieces = self._pieces[name]
        other = sorted({piece.kind for piece in pieces} - KINDS.keys())
        if other:
            raise NotKeptError(
                f"{self._path}: {name} is of the type {other[0]}, whose values are no codes times scales; {PLAIN_REMEDY}"
            )
        if any(piece.places is None for piece in pieces):
            raise NotKeptError(
                f"{self._path}: {name} is no tensor of the file with its rows reordered; {PLAIN_REMEDY}"
            )
        weights = [self._repacked(piece) for piece in pieces]
        if len(pieces) == 1 and _in_order(pieces[0]):
            return weights[0]
        alike = {(weight.kind, weight.scale.dtype, weight.group_size, weight.shift is None) for weight in weights}
        if len(alike) != 1:
            kinds = ", ".join(piece.kind for piece in pieces)
            raise NotKeptError(f"{self._path}: {name} is made of tensors of the types {kinds}; {PLAIN_REMEDY}")
        shifts = [weight.shift for weight in weights if weight.shift is not None]
        return replace(
            weights[0],
            codes=_joined(pieces, [weight.codes for weight in weights]),
            scale=_joined(pieces, [weight.scale for weight in weights]),
            shift=_joined(pieces, shifts) if shifts else None,
        )

    def dequantize(self, name: str) -> Tensor:
        """As transformers does it, by gguf's own function."""
        from gguf.quants import dequantize

        made: dict[str, Tensor] = {}
        for piece in self._pieces[name]:
            values = dequantize(piece.tensor.data, piece.tensor.tensor_type)
            for found, array in self._processed(values, piece.tensor.name, made):
                made[found] = torch.from_numpy(np.array(array, dtype=np.float32))
        return made[name]

    def read_plain(self, name: str) -> Tensor:
        return self.dequantize(name)

    def _repacked(self, piece: _Piece) -> QuantizedWeight:
        data = torch.from_numpy(np.array(piece.tensor.data))
        return repack(f"{self._path}: {piece.tensor.name}", piece.kind, data)

    def _processed(self, values: np.ndarray, name: str, made: dict[str, Tensor]) -> Iterator[tuple[str, Any]]:
        """A tensor as transformers puts it into a model, by name there; experts' it puts into `made`."""
        before = set(made)
        given = self._processor.process(
            weights=values, name=name, tensor_key_mapping=self._names, parsed_parameters={"tensors": made}
        )
        if given.name in self._names:
            yield self._names[given.name], given.weights
        elif given.name is None:
            yield from ((found, made[found].numpy()) for found in set(made) - before)

    def _placed(self, tensor: Any) -> list[tuple[str, _Piece]]:
        """The weight that a tensor is, or is a part of, and where its rows lie there."""
        alone = [(self._names[tensor.name], _Piece(tensor))] if tensor.name in self._names else []
        shape = tuple(int(size) for size in tensor.shape[::-1])
        if len(shape) < 2 or tensor.tensor_type.name in PLAIN_KINDS:
            return alone
        rows = int(np.prod(shape[:-1]))
        marks = np.arange(1, rows * _MARKED_COLUMNS + 1, dtype=np.float64).reshape(*shape[:-1], _MARKED_COLUMNS)
        try:
            marked = list(self._processed(marks, tensor.name, {}))
        except ValueError:  # of a shape that depends on the number of inputs
            return alone
        return [(name, _piece(tensor, shape, array)) for name, array in marked]


def _is_read_whole(architecture: str) -> bool:
    """Whether transformers reads an architecture's files by operations of its own, from the version on that has them."""
    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
    except ImportError:
        return False
    return bool(is_gguf_arch_supported(architecture))


def _piece(tensor: Any, shape: tuple[int, ...], marked: np.ndarray) -> _Piece:
    """What was made of marks: each row's number where it came to lie, and zero in rows of others."""
    if marked.shape[-1] != _MARKED_COLUMNS or marked.ndim != len(shape):
        return _Piece(tensor)
    marks = torch.from_numpy(np.array(marked, dtype=np.float64)).reshape(-1, _MARKED_COLUMNS)
    rows = int(np.prod(shape[:-1]))
    places = torch.nonzero(marks[:, 0]).flatten()
    sources = ((marks[places, 0] - 1) / _MARKED_COLUMNS).long()
    whole = torch.equal(sources.sort().values, torch.arange(rows))
    if not whole or not torch.equal(marks[places, 1], marks[places, 0] + 1):
        return _Piece(tensor)
    ordered = torch.empty_like(places)
    ordered[sources] = places
    return _Piece(tensor, ordered, tuple(marked.shape[:-1]))


def _is_plain(pieces: list[_Piece]) -> bool:
    return all(piece.kind in PLAIN_KINDS for piece in pieces)


def _in_order(piece: _Piece) -> bool:
    return piece.places is not None and torch.equal(piece.places, torch.arange(len(piece.places)))


def _joined(pieces: list[_Piece], parts: list[Tensor]) -> Tensor:
    """Rows of several tensors, each in its place."""
    shape = pieces[0].shape
    joined = parts[0].new_empty(int(np.prod(shape)), parts[0].shape[-1])
    for piece, rows in zip(pieces, parts, strict=True):
        joined[piece.places] = rows.flatten(0, -2)
    return joined.reshape(*shape, -1)
