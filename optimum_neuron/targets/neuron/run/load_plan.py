# SPDX-License-Identifier: Apache-2.0
"""The way from an artifact's compiled graphs to what each process of ranks loads.

Inputs and outputs of steps lie in memory that all processes map. It has no name: it is gone when they are.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ....arrays import dtype_name
from ....artifact.tensor_file import parse_head, read_head
from ..compile.neuron_cc import NEFF_SUFFIX
from ..graphs.checks import check_weights
from ..graphs.io import GraphIO, InputBinding, OutputBinding, cut_dim
from ..rank.plan import HALVES, RankGraph, RankPlan, RankTensor, RankWeight


def copy_inputs(source: int, destination: int, length: int) -> list[np.ndarray]:
    """Return the inputs of a graph that copies rows, in their order (COPY_INPUTS)."""
    return [np.array([number], np.int32) for number in (source, destination, length)]


@dataclass(frozen=True)
class LoadPlan:
    """Compiled graphs, and the files of their weights.

    Attributes:
        folder: holds `<graph>.neff`.
        lnc: physical cores per logical core, as compiled.
        graphs: descriptions by name; a state of several graphs is the same in all.
        calls: names of a step's inputs in the order of `run`; a graph that is left out takes the inputs that it uses.
        weights: one safetensors file per rank.
        tied_weights: alias to stored name.
    """

    folder: Path
    target: str
    lnc: int
    graphs: Mapping[str, GraphIO]
    calls: Mapping[str, tuple[str, ...]]
    weights: tuple[Path, ...]
    tied_weights: Mapping[str, str]

    @property
    def world_size(self) -> int:
        return len(self.weights)

    def call(self, graph: str) -> tuple[str, ...]:
        """Return the names of a step's inputs, also of those that its graph does not use."""
        return self.calls.get(graph) or self.graphs[graph].names("input")

    def neff(self, graph: str) -> Path:
        """Return the compiled file of a graph, or raise FileNotFoundError."""
        path = self.folder / (graph + NEFF_SUFFIX)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: the graph was lowered but not compiled; export the model again"
            )
        return path

    def states(self) -> dict[str, InputBinding]:
        """Return the states of all graphs by name, as one rank has them."""
        return {each.name: each for io in self.graphs.values() for each in io.inputs if each.role == "state"}


_ALIGNMENT = 64
_Key = tuple[str, tuple[int, ...], str]


class SharedTensors:
    """Tensors in a block of memory. Equal ones of different graphs are one: one graph runs at a time.

    The block has halves of one layout: a step is written to one while another runs in the other.

    Attributes:
        inputs: by half and graph, in the order of a step's inputs; None for one that the graph does not use.
        outputs: by half and graph, those that a step returns.
        file: descriptor of the memory.
        size: of half of the memory, in bytes.
    """

    def __init__(self, plan: LoadPlan) -> None:
        """Make the memory and map it."""
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
        block = np.frombuffer(mmap.mmap(self.file, HALVES * self.size), np.uint8)
        self.inputs: list[dict[str, list[np.ndarray | None]]] = []
        self.outputs: list[dict[str, list[np.ndarray]]] = []
        for half in block.reshape(HALVES, self.size):
            tensors = {key: _view_block(half, key, start) for key, start in self._places.items()}
            self.inputs.append(
                {
                    name: [None if each is None else tensors[_binding_key(each)] for each in bindings]
                    for name, bindings in inputs.items()
                }
            )
            self.outputs.append({name: [tensors[_binding_key(each)] for each in of] for name, of in outputs.items()})

    def place(self, binding: InputBinding | OutputBinding) -> int:
        """Return the offset of an input or output of a step, in bytes."""
        return self._places[_binding_key(binding)]


def _binding_key(binding: InputBinding | OutputBinding) -> _Key:
    return binding.name, binding.shape, binding.dtype


def _places(bindings: list[InputBinding | OutputBinding]) -> tuple[dict[_Key, int], int]:
    """Return offsets of tensors in bytes, and the size of all."""
    places: dict[_Key, int] = {}
    size = 0
    for binding in bindings:
        if _binding_key(binding) not in places:
            places[_binding_key(binding)] = size
            size += -(-_count_bytes(_binding_key(binding)) // _ALIGNMENT) * _ALIGNMENT
    return places, max(size, _ALIGNMENT)  # there is no block of nothing


def _count_bytes(key: _Key) -> int:
    return math.prod(key[1]) * np.dtype(key[2]).itemsize


def _view_block(block: np.ndarray, key: _Key, start: int) -> np.ndarray:
    return block[start : start + _count_bytes(key)].view(key[2]).reshape(key[1])


def rank_plan(plan: LoadPlan, tensors: SharedTensors, runtime: str, ranks: tuple[int, ...]) -> RankPlan:
    """Return the plan of the process that holds these ranks.

    Raises:
        ValueError: a file of weights lacks a tensor, or has it with another shape or type.
        FileNotFoundError: a compiled graph is missing.
    """
    graphs = {name: _make_graph(str(plan.neff(name)), io, tensors) for name, io in plan.graphs.items()}
    weights = tuple(_find_weights(plan, rank) for rank in ranks)
    return RankPlan(runtime, ranks, plan.world_size, tensors.size, weights, graphs)


def _make_graph(neff: str, io: GraphIO, tensors: SharedTensors) -> RankGraph:
    inputs = tuple(_make_tensor(each, each.role, tensors) for each in io.inputs)
    outputs = (_make_tensor(each, "output", tensors, each.alias_of) for each in io.outputs)
    return RankGraph(neff, inputs, tuple(outputs))


def _make_tensor(
    binding: InputBinding | OutputBinding, role: str, tensors: SharedTensors, alias_of: str | None = None
) -> RankTensor:
    in_memory = role == "input" or (role == "output" and alias_of is None)
    place = tensors.place(binding) if in_memory else None
    return RankTensor(binding.name, role, binding.shape, binding.dtype, place, alias_of)


def _find_weights(plan: LoadPlan, rank: int) -> tuple[RankWeight, ...]:
    """Return every stored tensor that a graph needs, once, with all names that graphs have for it."""
    path, wanted = plan.weights[rank], dict[str, list[str]]()
    with path.open("rb") as file:
        head = read_head(file, path)
    layout = parse_head(head, path)
    # A name that is tied stands for the other tensor alone, whatever the file holds under it.
    own = {name: stored for name, stored in layout.items() if name not in plan.tied_weights}
    tied = {alias: layout[stored] for alias, stored in plan.tied_weights.items() if stored in layout}
    check_weights(path, own | tied, plan.graphs.values())
    for io in plan.graphs.values():
        for name in io.names("weight"):
            names = wanted.setdefault(plan.tied_weights.get(name, name), [])
            if name not in names:
                names.append(name)
    found = ((names, layout[stored]) for stored, names in wanted.items())
    return tuple(
        RankWeight(tuple(names), str(path), len(head) + stored.start, stored.shape, dtype_name(stored.dtype))
        for names, stored in found
    )


def join_states(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join a state of all ranks, in their order, along its heads or channels; one of one dimension is whole on every rank."""
    return parts[0] if len(parts) == 1 or parts[0].ndim == 1 else np.concatenate(parts, axis=cut_dim(parts[0].shape))


def split_state(state: np.ndarray, world_size: int) -> Sequence[np.ndarray]:
    """Return each rank's part of what `join_states` made; raise ValueError where heads or channels do not divide."""
    if world_size == 1 or state.ndim == 1:
        return [state] * world_size
    dim = cut_dim(state.shape)
    if state.shape[dim] % world_size:
        raise ValueError(
            f"a state of {state.shape[dim]} heads or channels is not that of {world_size} ranks; read one first"
        )
    return np.split(state, world_size, axis=dim)
