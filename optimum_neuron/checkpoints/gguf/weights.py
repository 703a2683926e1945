# SPDX-License-Identifier: Apache-2.0
"""Tensors of GGUF files, plain or as blocks, under the names and in the row order of a transformers model.

A recipe that reorders rows, such as those of a Llama's queries, is applied to the rows' numbers to find the order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...step.features.codes.weight import QuantizedWeight
from ..formats.format import CheckpointFormat
from ..formats.stored import PLAIN_REMEDY, NotKeptError
from ..scratch import in_file
from .blocks import KINDS, repack
from .header import PLAIN_KINDS, GgufHeader
from .keys import REMEDY
from .layout import Recipe, recipes, stored_names


# Tables that llama.cpp and transformers compute themselves.
_COMPUTED = ("attn_rot_embd.weight", "rotary_emb.inv_freq")
_MARKED_COLUMNS = 2


class GgufFile(CheckpointFormat):
    """A GGUF file, by the names of a model's parameters."""

    def __init__(self, header: GgufHeader, model: PreTrainedModel) -> None:
        """Find the tensors of each parameter of a model, which may be without memory."""
        self._header = header
        self._path = header.path
        self._class = type(model).__name__
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._made = recipes(model, header.architecture)
        self._recipes = {
            name: recipe
            for name, recipe in self._made.items()
            if all(each in header.tensors for each in recipe.tensors)
        }
        self._wanted = stored_names(model)
        coded = {name for name, recipe in self._recipes.items() if set(self._kinds(recipe)) - set(PLAIN_KINDS)}
        self.layers = tuple(name for name in self._recipes if name in coded)
        self.plain = tuple(name for name in self._recipes if name not in coded)

    def check_accounted(self, known: frozenset[str]) -> None:
        """Raise ValueError for a file that lacks a parameter, or holds a tensor without a use.

        Args:
            known: tensors that the config was read from.
        """
        lacking = next((name for name in self._wanted if name not in self._recipes), None)
        if lacking is not None:
            tensors = self._made[lacking].tensors if lacking in self._made else (lacking,)
            absent = next((each for each in tensors if each not in self._header.tensors), lacking)
            raise ValueError(
                f"{self._path} lacks the tensor {absent}, which {self._class} needs; download the file again, or convert it again"
            )
        used = {tensor for recipe in self._recipes.values() for tensor in recipe.tensors} | known
        left = [name for name in self._header.tensors if name not in used and not name.endswith(_COMPUTED)]
        if left:
            more = f" and {len(left) - 1} more tensors" if len(left) > 1 else ""
            raise ValueError(f"{self._path} holds {left[0]}{more}, for which {self._class} has no place; {REMEDY}")

    def read_codes(self, name: str) -> QuantizedWeight:
        recipe = self._recipes[name]
        kinds = self._kinds(recipe)
        other = sorted(set(kinds) - KINDS.keys())
        if other:
            raise NotKeptError(
                f"{self._path}: {name} has the type {other[0]}, which holds no codes times scales; {PLAIN_REMEDY}"
            )
        places = self._row_places(recipe)
        if places is None:
            raise NotKeptError(
                f"{self._path}: {name} is no tensor of the file with its rows reordered; {PLAIN_REMEDY}"
            )
        weights = [self._repack_tensor(tensor, kind) for tensor, kind in zip(recipe.tensors, kinds, strict=True)]
        alike = {(weight.kind, weight.scale.dtype, weight.group_size, weight.shift is None) for weight in weights}
        if len(alike) != 1:
            raise NotKeptError(
                f"{self._path}: {name} is made of tensors with the types {', '.join(kinds)}; {PLAIN_REMEDY}"
            )
        if len(weights) == 1 and torch.equal(places.flatten(), torch.arange(places.numel())):
            return weights[0]
        shifts = [weight.shift for weight in weights if weight.shift is not None]
        return replace(
            weights[0],
            codes=_place_rows(places, [weight.codes for weight in weights]),
            scale=_place_rows(places, [weight.scale for weight in weights]),
            shift=_place_rows(places, shifts) if shifts else None,
        )

    def dequantize(self, name: str) -> Tensor:
        """Return a parameter by gguf's own function; raise ValueError where the file's tensors have other shapes."""
        recipe = self._recipes[name]
        values = [self._header.read_values(tensor) for tensor in recipe.tensors]
        try:
            made = recipe.make(*values)
        except (ValueError, IndexError) as error:
            raise self._wrong_shape(name) from error
        made = made.swapaxes(-1, -2) if recipe.is_transposed else made
        if [size for size in made.shape if size > 1] != [size for size in self._shapes[name] if size > 1]:
            raise self._wrong_shape(name)
        return torch.from_numpy(np.ascontiguousarray(made.reshape(self._shapes[name])))

    def read_plain(self, name: str) -> Tensor:
        return in_file(self.dequantize(name))

    def _wrong_shape(self, name: str) -> ValueError:
        shapes = " and ".join(
            f"{tensor} of the shape {list(self._header.tensors[tensor].shape)}"
            for tensor in self._recipes[name].tensors
        )
        return ValueError(
            f"{self._path} has {shapes}, and {self._class} makes {name} of the shape {list(self._shapes[name])} of it; download or "
            f"convert the file again"
        )

    def _kinds(self, recipe: Recipe) -> list[str]:
        return [self._header.kind(tensor) for tensor in recipe.tensors]

    def _repack_tensor(self, tensor: str, kind: str) -> QuantizedWeight:
        data = torch.from_numpy(np.array(self._header.read_bytes(tensor)))
        return repack(f"{self._path}: {tensor}", kind, data)

    def _row_places(self, recipe: Recipe) -> Tensor | None:
        """Return `[..., outputs]` int64: the place of each row of a weight among the rows of its tensors, one tensor after another.

        It is None where the weight is not made of all their rows, each as it is.
        """
        marks, first = [], 0
        for tensor in recipe.tensors:
            shape = self._header.tensors[tensor].shape[:-1]
            rows = int(np.prod(shape))
            numbers = np.arange(first * _MARKED_COLUMNS, (first + rows) * _MARKED_COLUMNS, dtype=np.float64)
            marks.append(numbers.reshape(*shape, _MARKED_COLUMNS))
            first += rows
        try:
            made = recipe.make(*marks)
        except (ValueError, IndexError):  # the shape depends on the number of inputs
            return None
        if made.shape[-1:] != (_MARKED_COLUMNS,) or not np.array_equal(made[..., 0] + 1, made[..., 1]):
            return None
        places = torch.from_numpy(np.array(made[..., 0] / _MARKED_COLUMNS)).long()
        whole = torch.equal(places.flatten().sort().values, torch.arange(first))
        return places if whole else None


def _place_rows(places: Tensor, parts: list[Tensor]) -> Tensor:
    """Return the rows of several tensors, each in its place."""
    return torch.cat([part.flatten(0, -2) for part in parts])[places]
