# SPDX-License-Identifier: Apache-2.0
"""What tests hold of the fake SDK: the commands, and graphs compiled by them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from optimum_neuron.targets.neuron.compile.compiler import compile_graphs
from optimum_neuron.targets.neuron.graphs.io import LoweredGraph
from optimum_neuron.targets.neuron.run.load_plan import LoadPlan


@dataclass(frozen=True)
class NeuronTools:
    """The fake commands.

    Attributes:
        log: what the compiler was called with, a line of JSON per call.
        fault: file that makes executions on the device fail; see site/device/fake_neuron/core.py.
    """

    folder: Path
    log: Path
    fault: Path
    monkeypatch: pytest.MonkeyPatch

    def calls(self) -> list[dict[str, Any]]:
        """What the compiler was called with: argv, cwd, environment, graph."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.is_file() else []

    def break_compiler(self, **faults: str) -> None:
        """Makes compilations fail, by graph; `every=` stands for all. See bin/neuronx_cc.py."""
        named = {"*" if name == "every" else name: fault for name, fault in faults.items()}
        self.monkeypatch.setenv("FAKE_NCC_FAULTS", json.dumps(named))

    def break_device(self, **fault: Any) -> None:
        """Makes the next execution on the device fail."""
        self.fault.write_text(json.dumps(fault))


Sdk = Callable[..., NeuronTools]


def cache_like(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of the shape that small graphs have for all of theirs."""
    return torch.tensor(values, dtype=dtype).view(1, 1, 1, -1)


def children() -> set[str]:
    """The processes that this thread started, by their numbers."""
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def make_plan(folder: Path, graphs: Sequence[LoweredGraph], target: str, *weights: dict[str, Tensor]) -> LoadPlan:
    """Compiles graphs and writes the weights of each rank into a new folder."""
    folder.mkdir(exist_ok=True)
    record = compile_graphs(graphs, target, folder)
    files = []
    for rank, tensors in enumerate(weights):
        files.append(folder / f"tp{rank}.safetensors")
        save_file(tensors, files[-1])
    return LoadPlan(
        folder=folder,
        target=target,
        lnc=record["lnc"],
        graphs={graph.name: graph.io for graph in graphs},
        calls={},
        weights=tuple(files),
        tied_weights={},
    )
