# SPDX-License-Identifier: Apache-2.0
"""A device that runs ahead, played by any executable: it keeps each slot's token, and counts what the host starts and reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from helpers import as_tensor

from optimum_neuron.arrays import to_numpy, to_torch
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.sampling.buffers import ChosenTokens, slots_of_rows
from optimum_neuron.step.spec import GraphSpec
from optimum_neuron.targets import Executable


class AheadOf:
    """An executable that runs ahead of the one that it plays.

    Attributes:
        log: `start 3` and `read 3 decode.tokens`, by the number of the step, as the host did them.
        transfers: by step, the outputs that were read.
    """

    runs_ahead = True

    def __init__(self, executable: Executable, graphs: Sequence[GraphSpec]) -> None:
        self._executable = executable
        self._specs = {graph.name: graph for graph in graphs}
        self._chosen = ChosenTokens(graphs[0].batch_size)
        self.log: list[str] = []
        self.transfers: list[list[str]] = []

    def start(self, graph: str, inputs: Sequence[np.ndarray], *, logits: bool) -> Callable[[], Sequence[Any]]:
        spec, number = self._specs[graph], len(self.transfers)
        given = {each.name: as_tensor(array) for each, array in zip(spec.inputs(), inputs, strict=True)}
        if spec.has_decode:
            given["decode.input_ids"] = self._chosen.fill_ids(given["decode.input_ids"])
        names = [each.name for each in spec.outputs(1)]
        found = [each.copy() for each in self._executable.run(graph, [to_numpy(each) for each in given.values()])]
        for group in ("decode", "chunk"):
            if f"{group}.tokens" in names:
                slots = slots_of_rows(given[f"{group}.position_ids"], given.get(f"{group}.seq_ids"))
                self._chosen.keep_tokens(to_torch(found[names.index(f"{group}.tokens")]), slots)
        self.log.append(f"start {number}")
        self.transfers.append([])
        wanted = [logits or not name.endswith(".logits") for name in names]

        def read() -> Sequence[Any]:
            self.transfers[number] = [name for name, is_wanted in zip(names, wanted, strict=True) if is_wanted]
            self.log.append(f"read {number}")
            return [array if is_wanted else None for array, is_wanted in zip(found, wanted, strict=True)]

        return read

    def run(self, graph: str, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return [np.empty(0) if each is None else each for each in self.start(graph, inputs, logits=True)()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)


def ahead_of(runner: GraphRunner, model: ModelSpec | None = None) -> tuple[GraphRunner, AheadOf]:
    """A runner of the same graphs on a device that runs ahead; `model` as in `GraphRunner`."""
    graphs = list(runner.family)
    executable = AheadOf(runner.executable, graphs)
    return GraphRunner(executable, runner.config, graphs, model), executable
