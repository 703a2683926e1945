# SPDX-License-Identifier: Apache-2.0
"""What it takes to load compiled graphs, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..compile.neuron_cc import NEFF_SUFFIX
from ..graph_io import GraphIO, InputBinding


def copy_inputs(source: int, destination: int, length: int) -> list[Tensor]:
    """The inputs of a graph that copies what slots hold, in their order (COPY_INPUTS)."""
    return [torch.tensor([number], dtype=torch.int32) for number in (source, destination, length)]


@dataclass(frozen=True)
class LoadPlan:
    """Compiled graphs, and where their weights are.

    Attributes:
        folder: holds `<graph>.neff`.
        lnc: physical cores per logical core, as compiled.
        graphs: descriptions by name; a state of several graphs is the same in all.
        calls: the inputs of a graph's step by name, in the order in which `run` takes them; a graph that is left out takes
            the inputs that it uses.
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
        """The names of a step's inputs, also of those that its graph does not use."""
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
        """The states of all graphs by name, as one rank has them."""
        return {each.name: each for io in self.graphs.values() for each in io.inputs if each.role == "state"}
