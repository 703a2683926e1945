# SPDX-License-Identifier: Apache-2.0
"""GGUF files: their tensors, as plain numbers or with their blocks kept, under the names and in the row order of a transformers model.

What is done to the rows of a tensor, such as to reorder those of a Llama's queries, is found by doing it to the rows' numbers.
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


# Tables that llama.cpp and transformers compute anew.
_COMPUTED = ("attn_rot_embd.weight", "rotary_emb.inv_freq")
_MARKED_COLUMNS = 2


class GgufFile(CheckpointFormat):
    """A GGUF file, by the names of a model's parameters."""

    def __init__(self, header: GgufHeader, model: PreTrainedModel) -> None:
        """Finds what each parameter is made of.

        Args:
            model: the transformers model that it holds the weights of; its parameters may be without memory.
        """
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
        """Refuses a file that lacks a parameter, or holds a tensor that nothing is made of.

        Args:
            known: tensors that the config was read from.

        Raises:
            ValueError: naming the tensor.
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

    def read(self, name: str) -> QuantizedWeight:
        recipe = self._recipes[name]
        kinds = self._kinds(recipe)
        other = sorted(set(kinds) - KINDS.keys())
        if other:
            raise NotKeptError(
                f"{self._path}: {name} is of the type {other[0]}, whose values are no codes times scales; {PLAIN_REMEDY}"
            )
        places = self._places(recipe)
        if places is None:
            raise NotKeptError(
                f"{self._path}: {name} is no tensor of the file with its rows reordered; {PLAIN_REMEDY}"
            )
        weights = [self._repacked(tensor, kind) for tensor, kind in zip(recipe.tensors, kinds, strict=True)]
        alike = {(weight.kind, weight.scale.dtype, weight.group_size, weight.shift is None) for weight in weights}
        if len(alike) != 1:
            raise NotKeptError(
                f"{self._path}: {name} is made of tensors of the types {', '.join(kinds)}; {PLAIN_REMEDY}"
            )
        if len(weights) == 1 and torch.equal(places.flatten(), torch.arange(places.numel())):
            return weights[0]
        shifts = [weight.shift for weight in weights if weight.shift is not None]
        return replace(
            weights[0],
            codes=_placed(places, [weight.codes for weight in weights]),
            scale=_placed(places, [weight.scale for weight in weights]),
            shift=_placed(places, shifts) if shifts else None,
        )

    def dequantize(self, name: str) -> Tensor:
        """By gguf's own function, as the parameter lies in the model.

        Raises:
            ValueError: the file's tensors have other shapes than the parameter.
        """
        recipe = self._recipes[name]
        values = [self._header.read_values(tensor) for tensor in recipe.tensors]
        try:
            made = recipe.make(*values)
        except (ValueError, IndexError) as error:
            raise self._misshapen(name) from error
        made = made.swapaxes(-1, -2) if recipe.is_transposed else made
        if [size for size in made.shape if size > 1] != [size for size in self._shapes[name] if size > 1]:
            raise self._misshapen(name)
        return torch.from_numpy(np.ascontiguousarray(made.reshape(self._shapes[name])))

    def read_plain(self, name: str) -> Tensor:
        return in_file(self.dequantize(name))

    def _misshapen(self, name: str) -> ValueError:
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

    def _repacked(self, tensor: str, kind: str) -> QuantizedWeight:
        data = torch.from_numpy(np.array(self._header.read_bytes(tensor)))
        return repack(f"{self._path}: {tensor}", kind, data)

    def _places(self, recipe: Recipe) -> Tensor | None:
        """`[..., outputs]` int64: for each row of a weight its place among those of the tensors, one after another.

        None where the weight is not made of all their rows, each as it is.
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
        except (ValueError, IndexError):  # of a shape that depends on the number of inputs
            return None
        if made.shape[-1:] != (_MARKED_COLUMNS,) or not np.array_equal(made[..., 0] + 1, made[..., 1]):
            return None
        places = torch.from_numpy(np.array(made[..., 0] / _MARKED_COLUMNS)).long()
        whole = torch.equal(places.flatten().sort().values, torch.arange(first))
        return places if whole else None


def _placed(places: Tensor, parts: list[Tensor]) -> Tensor:
    """The rows of several tensors, each in its place."""
    return torch.cat([part.flatten(0, -2) for part in parts])[places]
