# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model are the same but for their weights and the numbers that they have.

What is compared is everything that a layer's code could look at: classes, parts, attributes, and shapes, types and strides of
tensors. Numbers in which layers differ are told apart, so that who traces a layer can watch whether its code uses them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_MEMBERS = ("_parameters", "_buffers", "_modules")


class _DifferError(Exception):
    """Two layers are not the same."""


@dataclass
class Kind:
    """Layers of one list that are the same.

    Attributes:
        path: of the list, in its model.
        members: the numbers of the layers in the list.
        numbers: by module and attribute within a layer, where the layers have different whole numbers.
    """

    path: str
    layers: nn.ModuleList
    members: list[int]
    numbers: set[tuple[str, str]] = field(default_factory=set)

    def values(self, member: int) -> dict[tuple[str, str], int]:
        """A layer's own numbers."""
        return {(path, name): getattr(self.layers[member].get_submodule(path), name) for path, name in self.numbers}


def kinds_of_layers(model: nn.Module) -> list[Kind]:
    """Sorts the layers of each outermost list of modules; one whose tensors are also someone else's is left out."""
    owners = Counter(id(tensor) for tensor in _tensors(model))
    kinds: list[Kind] = []
    lists: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(f"{outer}.") for outer in lists):
            continue
        lists.append(path)
        own: list[Kind] = []
        for number, layer in enumerate(module):
            if all(owners[id(tensor)] == 1 for tensor in _tensors(layer)):
                _add(own, path, module, number)
        kinds += own
    return kinds


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        for members in (part._parameters, part._buffers):
            yield from (each for each in members.values() if each is not None)


def _add(kinds: list[Kind], path: str, layers: nn.ModuleList, number: int) -> None:
    for kind in kinds:
        try:
            found = set(_differing_numbers(layers[kind.members[0]], layers[number], ""))
        except _DifferError:
            continue
        kind.members.append(number)
        kind.numbers |= found
        return
    kinds.append(Kind(path, layers, [number]))


def _differing_numbers(one: nn.Module, other: nn.Module, path: str) -> Iterator[tuple[str, str]]:
    """Raises _DifferError where modules differ in something else."""
    if one is other and not any(True for _ in _tensors(one)):
        return
    _require(type(one) is type(other) and one.__dict__.keys() == other.__dict__.keys())
    for name in one.__dict__.keys() - set(_MEMBERS):
        first, second = one.__dict__[name], other.__dict__[name]
        if type(first) is int and type(second) is int:
            if first != second:
                yield path, name
        else:
            _require_same(first, second, one, other)
    for name in ("_parameters", "_buffers"):
        tensors = getattr(one, name), getattr(other, name)
        _require(list(tensors[0]) == list(tensors[1]))
        for key, tensor in tensors[0].items():
            _require(_facts(tensor) == _facts(tensors[1][key]))
    _require(list(one._modules) == list(other._modules))
    for name, part in one._modules.items():
        counterpart = other._modules[name]
        if part is None or counterpart is None:
            _require(part is counterpart)
        else:
            yield from _differing_numbers(part, counterpart, f"{path}.{name}" if path else name)


def _facts(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return type(tensor), tensor.shape, tensor.dtype, tensor.stride(), tensor.device, tensor.requires_grad


def _require(holds: bool) -> None:
    if not holds:
        raise _DifferError


def _require_same(first: Any, second: Any, one: nn.Module, other: nn.Module) -> None:
    """Raises _DifferError unless attributes of two modules are the same, or each is its own module's."""
    if first is second or (first is one and second is other):
        return
    _require(type(first) is type(second))
    if isinstance(first, _VALUES):
        _require(first == second)
    elif isinstance(first, types.MethodType):
        _require(first.__func__ is second.__func__)
        _require(first.__self__ is second.__self__ or (first.__self__ is one and second.__self__ is other))
    elif isinstance(first, functools.partial):
        parts = [(each.func, each.args, each.keywords) for each in (first, second)]
        _require_same(parts[0], parts[1], one, other)
    elif isinstance(first, Mapping):
        _require(list(first) == list(second))
        for key in first:
            _require_same(first[key], second[key], one, other)
    elif isinstance(first, Set):
        _require(first == second and all(isinstance(each, _VALUES) for each in first))
    elif isinstance(first, list | tuple):
        _require(len(first) == len(second))
        for each, counterpart in zip(first, second, strict=True):
            _require_same(each, counterpart, one, other)
    elif dataclasses.is_dataclass(first):
        _require_same(vars(first), vars(second), one, other)
    else:
        raise _DifferError
