# SPDX-License-Identifier: Apache-2.0
"""Layers that are the same.

Everything is compared that a layer's code could look at: classes, parts, attributes, and shapes, types and strides of tensors. Numbers
in which layers differ are listed, so that a trace can watch whether a layer's code uses them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..serving import CALLS_APART


_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_MEMBERS = ("_parameters", "_buffers", "_modules")


class _DifferError(Exception):
    """Two layers are not the same."""


@dataclass
class LayerKind:
    """Layers of one list that are the same: the list's path in its model, and the `members`' numbers in the list.

    `numbers` are modules and attributes within a layer, where the layers have different whole numbers.
    """

    path: str
    layers: nn.ModuleList
    members: list[int]
    numbers: set[tuple[str, str]] = field(default_factory=set)

    def own_numbers(self, member: int) -> dict[tuple[str, str], int]:
        return {(path, name): getattr(self.layers[member].get_submodule(path), name) for path, name in self.numbers}


def kinds_of_layers(model: nn.Module) -> list[LayerKind]:
    """Sort the layers of each outermost list of modules; leave out a layer with tensors that others share."""
    owners = Counter(id(tensor) for tensor in _list_tensors(model))
    kinds: list[LayerKind] = []
    lists: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(f"{outer}.") for outer in lists):
            continue
        lists.append(path)
        own: list[LayerKind] = []
        for number, layer in enumerate(module):
            if all(owners[id(tensor)] == 1 for tensor in _list_tensors(layer)):
                _add_layer(own, path, module, number)
        kinds += own
    return kinds


def _list_tensors(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        for members in (part._parameters, part._buffers):
            yield from (each for each in members.values() if each is not None)


def _add_layer(kinds: list[LayerKind], path: str, layers: nn.ModuleList, number: int) -> None:
    for kind in kinds:
        try:
            found = set(_differing_numbers(layers[kind.members[0]], layers[number], ""))
        except _DifferError:
            continue
        kind.members.append(number)
        kind.numbers |= found
        return
    kinds.append(LayerKind(path, layers, [number]))


def _differing_numbers(one: nn.Module, other: nn.Module, path: str) -> Iterator[tuple[str, str]]:
    """Yield the numbers in which modules differ; raises _DifferError where they differ in something else."""
    if one is other and not any(True for _ in _list_tensors(one)):
        return
    _require_alike(type(one) is type(other) and one.__dict__.keys() == other.__dict__.keys())
    for name in one.__dict__.keys() - set(_MEMBERS):
        first, second = one.__dict__[name], other.__dict__[name]
        if type(first) is int and type(second) is int:
            if first != second:
                yield path, name
        else:
            _require_same(first, second, one, other)
    for name in ("_parameters", "_buffers"):
        tensors = getattr(one, name), getattr(other, name)
        _require_alike(list(tensors[0]) == list(tensors[1]))
        for key, tensor in tensors[0].items():
            _require_alike(_tensor_facts(tensor) == _tensor_facts(tensors[1][key]))
    _require_alike(list(one._modules) == list(other._modules))
    for name, part in one._modules.items():
        counterpart = other._modules[name]
        if part is None or counterpart is None:
            _require_alike(part is counterpart)
        else:
            yield from _differing_numbers(part, counterpart, f"{path}.{name}" if path else name)


def _tensor_facts(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return type(tensor), tensor.shape, tensor.dtype, tensor.stride(), tensor.device, tensor.requires_grad


def _require_alike(holds: bool) -> None:
    if not holds:
        raise _DifferError


def _require_same(first: Any, second: Any, one: nn.Module, other: nn.Module) -> None:
    """Raise _DifferError unless attributes of two modules are the same, or each is its own module's."""
    if first is second or (first is one and second is other):
        return
    _require_alike(type(first) is type(second))
    if isinstance(first, _VALUES):
        _require_alike(first == second)
    elif isinstance(first, types.MethodType):
        _require_alike(first.__func__ is second.__func__)
        _require_alike(first.__self__ is second.__self__ or (first.__self__ is one and second.__self__ is other))
    elif isinstance(first, functools.partial):
        parts = [(each.func, each.args, each.keywords) for each in (first, second)]
        _require_same(parts[0], parts[1], one, other)
    elif isinstance(first, Mapping):
        _require_alike(list(first) == list(second))
        for key in first:
            _require_same(first[key], second[key], one, other)
    elif isinstance(first, Set):
        _require_alike(first == second and all(isinstance(each, _VALUES) for each in first))
    elif isinstance(first, list | tuple):
        _require_alike(len(first) == len(second))
        for each, counterpart in zip(first, second, strict=True):
            _require_same(each, counterpart, one, other)
    elif dataclasses.is_dataclass(first):
        _require_same(vars(first), vars(second), one, other)
    else:
        raise _DifferError


Rename = Callable[[str], str]
_STATE = re.compile(r"(kv_cache\.[a-z]+_)(\d+)((?:_\d+)?)")


class NotAlikeError(Exception):
    """Layers that look the same have other nodes, or nodes that others need: all have to be traced."""


def make_renaming(kind: LayerKind, origin: int, member: int) -> Rename:
    """Return a function from the names of one layer's tensors to those of another; other names stay.

    Both raise NotAlikeError: where by their numbers it is open which, and for a state of neither.
    """
    numbers: dict[int, int] = {}
    values = kind.own_numbers(member)
    for place, number in kind.own_numbers(origin).items():
        if numbers.setdefault(number, values[place]) != values[place]:
            raise NotAlikeError
    own, others = (f"model.{kind.path}.{each}." for each in (origin, member))

    def rename_tensor(name: str) -> str:
        if name.startswith(own):
            return others + name.removeprefix(own)
        match = _STATE.fullmatch(name)
        if match is None:
            return name
        calls, number = divmod(int(match[2]), CALLS_APART)
        if number not in numbers:
            raise NotAlikeError
        return f"{match[1]}{numbers[number] + calls * CALLS_APART}{match[3]}"

    return rename_tensor
