# SPDX-License-Identifier: Apache-2.0
"""What a process loads, as data: made by its parent, sent as JSON. Types have torch's names; no other package needs to know them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


# Inputs and outputs have so many places, which steps take in turn: one step is told while another runs.
HALVES = 2
# Types that numpy lacks travel as integers of their size: bytes are copied, and nothing here computes with them.
_CARRIERS = {"bfloat16": "int16"}


def carrier(dtype: str) -> np.dtype[Any]:
    """The numpy type in which a tensor's bytes travel."""
    return np.dtype(_CARRIERS.get(dtype, dtype))


@dataclass(frozen=True)
class Tensor:
    """A parameter or a result of a graph.

    Attributes:
        role: weight, state, input or output.
        place: of an input or output, its offset in the memory that all processes map; None for the others.
        alias_of: the state that a result is the new value of.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    place: int | None = None
    alias_of: str | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * carrier(self.dtype).itemsize

    def view(self, memory: np.ndarray) -> np.ndarray:
        """This input or output in half of the memory that all processes map, an array of bytes."""
        if self.place is None:
            raise ValueError(f"{self.name} is not in shared memory")
        return memory[self.place : self.place + self.nbytes].view(carrier(self.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class Weight:
    """A tensor in a file.

    Attributes:
        names: that graphs have for it.
        offset: of its first byte in the file.
    """

    names: tuple[str, ...]
    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> np.ndarray:
        """The tensor, mapped: a runtime copies it to the device."""
        file = np.memmap(self.path, dtype=np.uint8, mode="c")
        size = math.prod(self.shape) * carrier(self.dtype).itemsize
        return np.asarray(file[self.offset : self.offset + size]).view(carrier(self.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class Graph:
    """A compiled graph; parameters and results in the order of the module's own."""

    neff: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class RankPlan:
    """What one process loads.

    Attributes:
        runtime: as choose_runtime names it.
        ranks: that it holds, of `world_size`.
        memory: size in bytes of half of what all processes map.
        weights: of each of its ranks.
        graphs: by name; all have the same states.
    """

    runtime: str
    ranks: tuple[int, ...]
    world_size: int
    memory: int
    weights: tuple[tuple[Weight, ...], ...]
    graphs: dict[str, Graph]

    def states(self) -> dict[str, Tensor]:
        """The states of all graphs by name, as one rank has them."""
        return {each.name: each for graph in self.graphs.values() for each in graph.inputs if each.role == "state"}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RankPlan:
        graphs = {
            name: Graph(graph["neff"], _tensors(graph["inputs"]), _tensors(graph["outputs"]))
            for name, graph in data["graphs"].items()
        }
        weights = tuple(
            tuple(Weight(**each | {"names": tuple(each["names"]), "shape": tuple(each["shape"])}) for each in of_rank)
            for of_rank in data["weights"]
        )
        return cls(data["runtime"], tuple(data["ranks"]), data["world_size"], data["memory"], weights, graphs)


def _tensors(data: list[dict[str, Any]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(**each | {"shape": tuple(each["shape"])}) for each in data)
