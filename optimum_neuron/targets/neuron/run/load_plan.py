# SPDX-License-Identifier: Apache-2.0
"""What it takes to load compiled graphs, as data: a runtime gets it, and so does each rank's process, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        """The compiled file of a graph.

        Raises:
            FileNotFoundError: it is missing.
        """
        path = self.folder / (graph + NEFF_SUFFIX)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: the graph was lowered but not compiled; export the model again"
            )
        return path

    def states(self) -> dict[str, InputBinding]:
        """The states of all graphs by name, as one rank has them."""
        return {each.name: each for io in self.graphs.values() for each in io.inputs if each.role == "state"}

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "target": self.target,
            "lnc": self.lnc,
            "graphs": {name: io.to_dict() for name, io in self.graphs.items()},
            "calls": {name: list(names) for name, names in self.calls.items()},
            "weights": [str(path) for path in self.weights],
            "tied_weights": dict(self.tied_weights),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LoadPlan:
        return cls(
            folder=Path(data["folder"]),
            target=data["target"],
            lnc=data["lnc"],
            graphs={name: GraphIO.from_dict(io) for name, io in data["graphs"].items()},
            calls={name: tuple(names) for name, names in data["calls"].items()},
            weights=tuple(Path(path) for path in data["weights"]),
            tied_weights=data["tied_weights"],
        )
