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
from ..graphs.io import GraphIO, cut_dim
from ..rank.plan import HALVES, RankGraph, RankTensor, RankWeight


_ALIGNMENT = 64


@dataclass(frozen=True)
class LoadPlan:
    """Compiled graphs, `folder/<graph>.neff`, and the files of their weights, one per rank.

    Attributes:
        lnc: physical cores per logical core, as compiled.
        graphs: descriptions by name; a state of several graphs is the same in all.
        calls: names of a step's inputs in the order of `run`; a graph that is left out takes the inputs that it uses.
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

    def neff(self, graph: str) -> Path:
        """Return the compiled file of a graph, or raise FileNotFoundError."""
        path = self.folder / (graph + NEFF_SUFFIX)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: the graph was lowered but not compiled; export the model again"
            )
        return path


class SharedTensors:
    """Tensors in a block of memory. Equal ones of different graphs are one: one graph runs at a time.

    The block has halves of one layout, of `size` bytes each: a step is written to one while another runs in the other.

    Attributes:
        graphs: by name, with the offsets of inputs and outputs.
        inputs: by half and graph, in the order of a step's inputs; None for one that the graph does not use.
        outputs: by half and graph, those that a step returns.
        file: descriptor of the memory.
    """

    def __init__(self, plan: LoadPlan) -> None:
        """Make the memory and map it; raise FileNotFoundError where a compiled graph is missing."""
        self.size = 0
        self._places: dict[tuple[str, tuple[int, ...], str], int] = {}
        self.graphs = {
            name: RankGraph(
                str(plan.neff(name)),
                tuple(self._place(RankTensor(each.name, each.role, each.shape, each.dtype)) for each in io.inputs),
                tuple(
                    self._place(RankTensor(each.name, "output", each.shape, each.dtype, None, each.alias_of))
                    for each in io.outputs
                ),
            )
            for name, io in plan.graphs.items()
        }
        self.size = max(self.size, _ALIGNMENT)  # there is no block of nothing
        self.file = os.memfd_create("optimum_neuron")
        os.ftruncate(self.file, HALVES * self.size)
        block = np.frombuffer(mmap.mmap(self.file, HALVES * self.size), dtype=np.uint8).reshape(HALVES, self.size)
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

    def _place(self, tensor: RankTensor) -> RankTensor:
        """Return an input or output of a step with its place, and others as they are."""
        if tensor.role not in ("input", "output") or tensor.alias_of is not None:
            return tensor
        key = tensor.name, tensor.shape, tensor.dtype
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
    own = {name: stored for name, stored in layout.items() if name not in plan.tied_weights}
    tied = {alias: layout[stored] for alias, stored in plan.tied_weights.items() if stored in layout}
    check_weights(path, own | tied, plan.graphs.values())
    for io in plan.graphs.values():
        for name in io.names("weight"):
            wanted.setdefault(plan.tied_weights.get(name, name), {})[name] = None
    return tuple(
        RankWeight(
            tuple(names),
            str(path),
            len(head) + layout[stored].start,
            layout[stored].shape,
            dtype_name(layout[stored].dtype),
        )
        for stored, names in wanted.items()
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
