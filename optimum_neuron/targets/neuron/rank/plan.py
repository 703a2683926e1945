# SPDX-License-Identifier: Apache-2.0
"""The plan of a process as data: its parent makes it and sends it as JSON. Types have torch's names."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from itertools import pairwise
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np


# Inputs and outputs have so many places, which steps take in turn: one step is written while another runs.
HALVES = 2
# Types that numpy lacks travel as integers of their size: bytes are copied, and nothing here computes with them.
_CARRIERS = {"bfloat16": "int16", "float8_e4m3fn": "int8"}
DTYPES = (
    *_CARRIERS, "float16", "float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
RUNTIMES = ("nrtpy", "libtorch-neuronx-lite", "neuronx-distributed")
_MOST, _LARGEST = 1 << 16, 1 << 48  # ranks, and bytes


def carrier(dtype: str) -> np.dtype[Any]:
    """Return the numpy type in which a tensor's bytes travel."""
    return np.dtype(_CARRIERS.get(dtype, dtype))


@dataclass(frozen=True)
class RankTensor:
    """A parameter or a result of a graph.

    Attributes:
        role: weight, state, input or output.
        place: offset of an input or output in the memory that all processes map; None for the others.
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
        return _count_bytes(self.shape, self.dtype)

    def view(self, memory: np.ndarray) -> np.ndarray:
        """Return this input or output in half of the memory that all processes map, an array of bytes."""
        if self.place is None:
            raise ValueError(f"{self.name} is not in shared memory")
        return memory[self.place : self.place + self.nbytes].view(carrier(self.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class RankWeight:
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
    """The graphs and weights that one process loads.

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
    weights: tuple[tuple[RankWeight, ...], ...]
    graphs: dict[str, RankGraph]

    def states(self) -> dict[str, RankTensor]:
        """Return the states of all graphs by name, as one rank has them."""
        return {each.name: each for graph in self.graphs.values() for each in graph.inputs if each.role == "state"}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> RankPlan:
        """Read a plan; raise ValueError where `data` is none, or one of its fields contradicts another."""
        plan: RankPlan = _build_value(cls, data)
        _check_that(plan.runtime in RUNTIMES, f"it names the runtime {plan.runtime!r:.60}")
        ranks = set(plan.ranks) & set(range(max(0, min(plan.world_size, _MOST))))
        fits = 0 < len(ranks) == len(plan.ranks) == len(plan.weights)
        _check_that(
            fits, f"it has weights of {len(plan.weights)} ranks for {list(plan.ranks)[:9]} of {plan.world_size}"
        )
        _check_that(0 < plan.memory <= _LARGEST, f"it maps {plan.memory} bytes")
        states = plan.states()
        for weights in plan.weights:
            known = {name: (each.shape, each.dtype) for each in weights for name in each.names}
            for weight in weights:
                _check_file(weight.path, _count_bytes(weight.shape, weight.dtype), weight.offset)
                _check_that(len(weight.names) > 0, f"it has a weight at {weight.offset} without a name")
            for graph in plan.graphs.values():
                _check_graph(graph, plan.memory, known, states)
        return plan


_Known = Mapping[str, tuple[tuple[int, ...], str]]


def _check_graph(graph: RankGraph, memory: int, weights: _Known, states: Mapping[str, RankTensor]) -> None:
    _check_file(graph.neff, 0, 0)
    given = {each.name: each for each in graph.inputs}
    _check_that(len(given) == len(graph.inputs), "two parameters have one name")
    for tensor in (*graph.inputs, *graph.outputs):
        is_input, size = given.get(tensor.name) is tensor, tensor.nbytes
        roles = ("input", "state", "weight") if is_input else ("output",)
        _check_that(tensor.role in roles, f"{tensor.name} has the role {tensor.role!r:.60}")
        of = given.get(tensor.alias_of) if tensor.alias_of is not None else None
        same = of is not None and (of.role, of.shape, of.dtype) == ("state", tensor.shape, tensor.dtype)
        _check_that(
            tensor.alias_of is None or (same and not is_input),
            f"{tensor.name} is no new value of {tensor.alias_of!r:.60}",
        )
        shared = tensor.role == "input" or (tensor.role == "output" and tensor.alias_of is None)
        place = -1 if tensor.place is None else tensor.place
        fits = place % 8 == 0 and 0 <= place <= place + size <= memory if shared else tensor.place is None
        _check_that(fits, f"{tensor.name} of {size} bytes lies at {tensor.place} of {memory}")
        form = (tensor.shape, tensor.dtype)
        _check_that(
            tensor.role != "weight" or weights.get(tensor.name) == form, f"no file has {tensor.name} of {form}"
        )
        known = states.get(tensor.name)
        other = tensor.role == "state" and (known is None or (known.shape, known.dtype) != form)
        _check_that(not other, f"graphs have {tensor.name} of several sizes")
    for at, after in pairwise(
        sorted((each.place, each.nbytes) for each in (*graph.inputs, *graph.outputs) if each.place is not None)
    ):
        _check_that(sum(at) <= after[0], f"two of its tensors lie at {after[0]} of shared memory")
    renewed = [each.alias_of for each in graph.outputs if each.alias_of is not None]
    _check_that(len(set(renewed)) == len(renewed), "two results are the new value of one state")


def _check_file(path: str, size: int, offset: int) -> None:
    """Check that a file has some bytes: a plan names files in full, as its maker found them."""
    has = os.path.getsize(path) if os.path.isabs(path) and os.path.isfile(path) else -1
    _check_that(0 <= offset <= offset + size <= has, f"{path!r:.200} has no {size} bytes at {offset}")


def _count_bytes(shape: tuple[int, ...], dtype: str) -> int:
    _check_that(dtype in DTYPES, f"it has the type {dtype!r:.60}")
    _check_that(all(0 <= each <= _LARGEST for each in shape), f"it has the shape {list(shape)[:9]}")
    return math.prod(shape) * carrier(dtype).itemsize


def _check_that(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _build_value(kind: Any, value: Any) -> Any:
    """Build a value of a type from the JSON that it travels as."""
    make, origin, of = kind, get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        fits = isinstance(value, dict) and value.keys() == hints.keys()
        if fits:
            return make(**{name: _build_value(each, value[name]) for name, each in hints.items()})
    elif origin is tuple and isinstance(value, list | tuple):
        return tuple(_build_value(of[0], each) for each in value)
    elif origin is dict and isinstance(value, dict):
        return {name: _build_value(of[1], each) for name, each in value.items()}
    elif type(None) in of:
        return None if value is None else _build_value(of[0], value)
    elif type(value) is kind:
        return value
    raise ValueError(f"it has {value!r:.60} where {getattr(kind, '__name__', kind)} belongs")


def from_array(array: np.ndarray, dtype: str) -> Any:
    """Return a tensor of torch's type of that name in the array's memory."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).view(getattr(torch, dtype)).view(array.shape)


def to_array(tensor: Any) -> np.ndarray:
    """Return the bytes of a tensor on the CPU."""
    import torch

    array: np.ndarray = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array
