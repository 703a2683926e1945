# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs of steps in memory that several processes map. It has no name: it is gone when they are."""

from __future__ import annotations

import math
import mmap
import os

import torch
from torch import Tensor

from ..graph_io import InputBinding, OutputBinding
from ..rank.plan import HALVES
from .load_plan import LoadPlan


_ALIGNMENT = 64
_Key = tuple[str, tuple[int, ...], str]


class SharedTensors:
    """Tensors in a block of memory. Those of different graphs that are alike are one: one graph runs at a time.

    The block has halves, in which all lies alike: a step is told in one while another runs in the other.

    Attributes:
        inputs: by half and graph, in the order of a step's inputs; None for one that the graph does not use.
        outputs: by half and graph, those that a step returns.
        file: descriptor of the memory.
        size: of half of the memory, in bytes.
    """

    def __init__(self, plan: LoadPlan) -> None:
        """Makes the memory and maps it."""
        inputs: dict[str, list[InputBinding | None]] = {}
        outputs: dict[str, list[OutputBinding]] = {}
        for name, io in plan.graphs.items():
            known = {each.name: each for each in io.inputs}
            inputs[name] = [known.get(each) for each in plan.call(name)]
            outputs[name] = [each for each in io.outputs if each.alias_of is None]
        used: list[InputBinding | OutputBinding] = [each for lists in inputs.values() for each in lists if each]
        self._places, self.size = _places([*used, *(each for lists in outputs.values() for each in lists)])
        self.file = os.memfd_create("optimum_neuron")
        os.ftruncate(self.file, HALVES * self.size)
        block = torch.frombuffer(mmap.mmap(self.file, HALVES * self.size), dtype=torch.uint8)
        self.inputs: list[dict[str, list[Tensor | None]]] = []
        self.outputs: list[dict[str, list[Tensor]]] = []
        for half in block.view(HALVES, self.size):
            tensors = {key: _view(half, key, start) for key, start in self._places.items()}
            self.inputs.append(
                {
                    name: [None if each is None else tensors[_key(each)] for each in bindings]
                    for name, bindings in inputs.items()
                }
            )
            self.outputs.append({name: [tensors[_key(each)] for each in of] for name, of in outputs.items()})

    def place(self, binding: InputBinding | OutputBinding) -> int:
        """Where an input or output of a step lies, in bytes."""
        return self._places[_key(binding)]


def _key(binding: InputBinding | OutputBinding) -> _Key:
    return binding.name, binding.shape, binding.dtype


def _places(bindings: list[InputBinding | OutputBinding]) -> tuple[dict[_Key, int], int]:
    """Offsets of tensors in bytes, and the size of all."""
    places: dict[_Key, int] = {}
    size = 0
    for binding in bindings:
        if _key(binding) not in places:
            places[_key(binding)] = size
            size += -(-_bytes(_key(binding)) // _ALIGNMENT) * _ALIGNMENT
    return places, max(size, _ALIGNMENT)  # there is no block of nothing


def _bytes(key: _Key) -> int:
    itemsize: int = getattr(torch, key[2]).itemsize
    return math.prod(key[1]) * itemsize


def _view(block: Tensor, key: _Key, start: int) -> Tensor:
    return block[start : start + _bytes(key)].view(getattr(torch, key[2])).view(key[1])
