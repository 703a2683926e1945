# SPDX-License-Identifier: Apache-2.0
"""The plan of a process as data: its parent makes it and sends it as JSON. Types have torch's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """A parameter or a result of a graph: a weight, a state, an input or an output, or a result that renews the state `alias_of`.

    `place` is the offset of an input or output in half of the memory that all processes map.
    """

    name: str
    role: str
    shape: Sequence[int]
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

    names: Sequence[str]
    path: str
    offset: int
    shape: Sequence[int]
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
    inputs: Sequence[RankTensor]
    outputs: Sequence[RankTensor]


@dataclass(frozen=True)
class RankPlan:
    """The graphs, which share states, and the weights of each of its ranks that one process loads into a runtime of choose_runtime.

    `memory` is the size in bytes of half of the inputs and outputs that all processes map, `cpus` those to run on, none for any.
    """

    runtime: str
    ranks: Sequence[int]
    world_size: int
    memory: int
    cpus: Sequence[int]
    weights: Sequence[Sequence[RankWeight]]
    graphs: dict[str, RankGraph]

    def states(self) -> dict[str, RankTensor]:
        """Return the states of all graphs by name, as one rank has them."""
        return {each.name: each for graph in self.graphs.values() for each in graph.inputs if each.role == "state"}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RankPlan:
        """Read the JSON of `dataclasses.asdict`. The parent has checked files, shapes and names before it sends them."""
        weights = [[RankWeight(**weight) for weight in each] for each in data["weights"]]
        graphs = {
            name: RankGraph(
                each["neff"], *([RankTensor(**one) for one in each[side]] for side in ("inputs", "outputs"))
            )
            for name, each in data["graphs"].items()
        }
        return cls(**data | {"weights": weights, "graphs": graphs})
