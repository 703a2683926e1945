# SPDX-License-Identifier: Apache-2.0
"""The plan of a process as data: its parent makes it and sends it as JSON. Types have torch's names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


# Inputs and outputs have so many places, which steps take in turn: one step is written while another runs.
HALVES = 2
# Types that numpy lacks travel as integers of their size: bytes are copied, and nothing here computes with them.
_CARRIERS = {"bfloat16": "int16", "float8_e4m3fn": "int8"}


def carrier(dtype: str) -> np.dtype[Any]:
    """Return the numpy type in which a tensor's bytes travel."""
    return np.dtype(_CARRIERS.get(dtype, dtype))


@dataclass(frozen=True)
class RankTensor:
    """A parameter or a result of a graph.

    Attributes:
        role: weight, state, input or output.
        place: offset of an input or output in half of the memory that all processes map; None for the others.
        alias_of: the state that a result renews.
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
        """Return this input or output in half of the memory that all processes map, an array of bytes."""
        assert self.place is not None
        return memory[self.place : self.place + self.nbytes].view(carrier(self.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class RankWeight:
    """A tensor in a file, from byte `offset` on, and the names that graphs have for it."""

    names: tuple[str, ...]
    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: str

    def read_array(self) -> np.ndarray:
        """Return the tensor, mapped: a runtime copies it to the device."""
        file = np.memmap(self.path, dtype=np.uint8, mode="c")
        size = math.prod(self.shape) * carrier(self.dtype).itemsize
        return np.asarray(file[self.offset : self.offset + size]).view(carrier(self.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class RankGraph:
    """A compiled graph; parameters and results in the order of the module's own."""

    neff: str
    inputs: tuple[RankTensor, ...]
    outputs: tuple[RankTensor, ...]


@dataclass(frozen=True)
class RankPlan:
    """The graphs, which share states, and weights that one process loads.

    Attributes:
        runtime: as choose_runtime names it.
        ranks: that it holds, of `world_size`; each has weights.
        memory: size in bytes of half of what all processes map.
    """

    runtime: str
    ranks: tuple[int, ...]
    world_size: int
    memory: int
    weights: tuple[tuple[RankWeight, ...], ...]
    graphs: dict[str, RankGraph]

    def states(self) -> dict[str, RankTensor]:
        """Return the states of all graphs by name, as one rank has them."""
        return {each.name: each for graph in self.graphs.values() for each in graph.inputs if each.role == "state"}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RankPlan:
        """Read the JSON of `dataclasses.asdict`. The parent has checked files, shapes and names before it sends them."""
        weights = tuple(tuple(map(_read_weight, each)) for each in data["weights"])
        graphs = {
            name: RankGraph(
                each["neff"], tuple(map(_read_tensor, each["inputs"])), tuple(map(_read_tensor, each["outputs"]))
            )
            for name, each in data["graphs"].items()
        }
        return cls(**data | {"ranks": tuple(data["ranks"]), "weights": weights, "graphs": graphs})


def _read_tensor(data: dict[str, Any]) -> RankTensor:
    return RankTensor(**data | {"shape": tuple(data["shape"])})


def _read_weight(data: dict[str, Any]) -> RankWeight:
    return RankWeight(**data | {"names": tuple(data["names"]), "shape": tuple(data["shape"])})


def from_array(array: np.ndarray, dtype: str) -> Any:
    """Return a tensor of torch's type of that name in the array's memory."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).view(getattr(torch, dtype)).view(array.shape)


def to_array(tensor: Any) -> np.ndarray:
    """Return the bytes of a tensor on the CPU."""
    import torch

    array: np.ndarray = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array
