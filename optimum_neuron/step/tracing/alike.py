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
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..serving import CALLS_APART


_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_MEMBERS = ("_parameters", "_buffers", "_modules")


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
                for kind in own:
                    found = _differing_numbers(module[kind.members[0]], layer)
                    if found is not None:
                        kind.members.append(number)
                        kind.numbers |= found
                        break
                else:
                    own.append(LayerKind(path, module, [number]))
        kinds += own
    return kinds


def _list_tensors(module: nn.Module) -> list[Tensor]:
    return [
        each
        for part in module.modules()
        for members in (part._parameters, part._buffers)
        for each in members.values()
        if each is not None
    ]


def _differing_numbers(one: nn.Module, other: nn.Module) -> set[tuple[str, str]] | None:
    """Return the numbers in which layers differ; None where they differ in something else."""
    parts, others = (list(layer.named_modules(remove_duplicate=False)) for layer in (one, other))
    if [path for path, _ in parts] != [path for path, _ in others]:
        return None
    numbers = set()
    for (path, part), (_, counterpart) in zip(parts, others, strict=True):
        if _describe_module(part) != _describe_module(counterpart):
            return None
        for name in vars(part).keys() - set(_MEMBERS):
            first, second = vars(part)[name], vars(counterpart)[name]
            if type(first) is int and type(second) is int:
                numbers |= {(path, name)} if first != second else set()
            elif not _are_same(first, second, part, counterpart):
                return None
    return numbers


def _describe_module(module: nn.Module) -> Any:
    tensors = [
        (
            name,
            None
            if each is None
            else (type(each), each.shape, each.dtype, each.stride(), each.device, each.requires_grad),
        )
        for members in (module._parameters, module._buffers)
        for name, each in members.items()
    ]
    return type(module), set(vars(module)), tensors


def _are_same(first: Any, second: Any, one: nn.Module, other: nn.Module) -> bool:
    """Return whether attributes of two modules are the same, or each is its own module's."""
    if first is second or (first is one and second is other):
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, _VALUES):
        return bool(first == second)
    if isinstance(first, Set):
        return bool(first == second) and all(isinstance(each, _VALUES) for each in first)
    if isinstance(first, Mapping):
        return list(first) == list(second) and all(_are_same(first[key], second[key], one, other) for key in first)
    if isinstance(first, types.MethodType):
        parts = [[each.__func__, each.__self__] for each in (first, second)]
    elif isinstance(first, functools.partial):
        parts = [[each.func, each.args, each.keywords] for each in (first, second)]
    elif isinstance(first, list | tuple):
        parts = [list(first), list(second)]
    elif dataclasses.is_dataclass(first):
        parts = [[vars(first)], [vars(second)]]
    else:
        return False
    pairs = zip(*parts, strict=False)
    return len(parts[0]) == len(parts[1]) and all(_are_same(left, right, one, other) for left, right in pairs)


Rename = Callable[[str], str]
_STATE = re.compile(r"(kv_cache\.[a-z]+_)(\d+)((?:_\d+)?)")


class NotAlikeError(Exception):
    """Layers that look the same have other nodes, or nodes that others need: all have to be traced."""


def make_renaming(kind: LayerKind, origin: int, member: int) -> Rename:
    """Return a function from names of one layer's tensors to another's; both raise NotAlikeError where numbers leave it open."""
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
