# SPDX-License-Identifier: Apache-2.0
"""The way from an artifact's compiled graphs to what each process of ranks loads.

Inputs and outputs of steps lie in memory that all processes map. It has no name: it is gone when they are.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ....arrays import dtype_name
from ....artifact.tensor_file import parse_head, read_head
from ..compile.neuron_cc import NEFF_SUFFIX
from ..graphs.checks import check_weights
from ..graphs.io import GraphIO, InputBinding, OutputBinding, cut_dim
from ..rank.plan import HALVES, RankGraph, RankTensor, RankWeight
from ..rank.steps import board_bytes


_ALIGNMENT = 64


@dataclass(frozen=True)
class LoadPlan:
    """Compiled graphs, `folder/<graph>.neff` with `lnc` physical cores per logical one, and the files of their weights, one per rank.

    `calls` names a step's inputs in the order of `run`; a graph that it leaves out takes the inputs that it uses. `tied_weights` are alias to
    stored name.
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

    def neff(self, graph: str) -> Path:
        """Return the compiled file of a graph, or raise FileNotFoundError."""
        path = self.folder / (graph + NEFF_SUFFIX)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: the graph was lowered but not compiled; export the model again"
            )
        return path


class SharedTensors:
    """Tensors in a block of memory, `file`. Equal ones of different graphs are one: one graph runs at a time.

    The block has halves of one layout, of `size` bytes each: a step is written to one while another runs in the other. `graphs` have the
    offsets; `inputs` and `outputs` are by half and graph, in a step's order, with None for an input that the graph does not use. The
    memory of a StepBoard follows.
    """

    def __init__(self, plan: LoadPlan) -> None:
        """Make the memory and map it; raise FileNotFoundError where a compiled graph is missing."""
        self.size = 0
        self._places: dict[tuple[object, ...], int] = {}
        self.graphs = {}
        for name, io in plan.graphs.items():
            inputs = [self._place(each, each.role, None) for each in io.inputs]
            outputs = [self._place(each, "output", each.alias_of) for each in io.outputs]
            self.graphs[name] = RankGraph(str(plan.neff(name)), inputs, outputs)
        self.size = max(self.size, _ALIGNMENT)  # there is no block of nothing
        self.file = os.memfd_create("optimum_neuron")
        size = HALVES * self.size
        os.ftruncate(self.file, size + board_bytes(plan.world_size))
        memory = memoryview(mmap.mmap(self.file, 0))
        block, self.board = np.frombuffer(memory[:size], np.uint8).reshape(HALVES, self.size), memory[size:]
        self.inputs: list[dict[str, list[np.ndarray | None]]] = [{} for _ in block]
        self.outputs: list[dict[str, list[np.ndarray]]] = [{} for _ in block]
        for number, half in enumerate(block):
            for name, graph in self.graphs.items():
                used, returned = (
                    {each.name: each.view(half).view(each.dtype) for each in side if each.place is not None}
                    for side in (graph.inputs, graph.outputs)
                )
                self.inputs[number][name] = [used.get(each) for each in plan.calls.get(name, used)]
                self.outputs[number][name] = list(returned.values())

    def _place(self, each: InputBinding | OutputBinding, role: str, alias_of: str | None) -> RankTensor:
        """Return a tensor, with a place where it is an input or output of a step."""
        tensor = RankTensor(each.name, role, each.shape, each.dtype, alias_of=alias_of)
        if role not in ("input", "output") or alias_of is not None:
            return tensor
        key = tensor.name, *tensor.shape, tensor.dtype
        if key not in self._places:
            self._places[key] = self.size
            self.size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return replace(tensor, place=self._places[key])


def find_weights(plan: LoadPlan, rank: int) -> tuple[RankWeight, ...]:
    """Return every stored tensor that a graph needs, once, with all names for it; raise ValueError where the file is not that of the graphs."""
    path, wanted = plan.weights[rank], dict[str, dict[str, None]]()
    with path.open("rb") as file:
        head = read_head(file, path)
    layout = parse_head(head, path)
    # A name that is tied stands for the other tensor alone, whatever the file holds under it.
    tied = {alias: layout[stored] for alias, stored in plan.tied_weights.items() if stored in layout}
    own = {name: stored for name, stored in layout.items() if name not in plan.tied_weights}
    check_weights(path, own | tied, plan.graphs.values())
    for name in (name for io in plan.graphs.values() for name in io.names("weight")):
        wanted.setdefault(plan.tied_weights.get(name, name), {})[name] = None
    weights = []
    for stored, names in wanted.items():
        tensor = layout[stored]
        start, dtype = len(head) + tensor.start, dtype_name(tensor.dtype)
        weights.append(RankWeight(tuple(names), str(path), start, tensor.shape, dtype))
    return tuple(weights)


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
