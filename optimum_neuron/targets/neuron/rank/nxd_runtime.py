# SPDX-License-Identifier: Apache-2.0
"""Runs NEFFs through neuronx-distributed's NxDModel: all ranks in this process (Inferentia2, Trainium1, Trainium2).

The model object is built from NEFF and MetaNeff; its own file format, a pickle that other versions cannot read, is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .failures import doing
from .metaneff import build_metaneff
from .plan import Graph, RankPlan, carrier
from .torch_arrays import from_array, to_array


class NxDGraphs:
    """Loaded graphs of all ranks; see `Graphs`."""

    def __init__(self, plan: RankPlan, memory: np.ndarray) -> None:
        with doing("starting neuronx-distributed"):
            import torch
            from neuronx_distributed import NxDModel
            from neuronx_distributed.trace.nxd_model.base_nxd_model import StateInitializer
        self._states = plan.states()
        self._world_size = plan.world_size
        shapes = {name: list(each.shape) for name, each in self._states.items()}
        dtypes = {name: getattr(torch, each.dtype) for name, each in self._states.items()}
        initializer = StateInitializer(shapes, dtypes, plan.world_size) if self._states else None
        self._model = NxDModel(plan.world_size, state_initializer=initializer)
        for name, graph in plan.graphs.items():
            with doing(f"loading graph {name}"):
                self._add(name, graph, input_names(plan.graphs.values()))
        with doing("loading the weights"):
            self._model.set_weights(
                [
                    {name: from_array(each.read(), each.dtype) for each in weights for name in each.names}
                    for weights in plan.weights
                ]
            )
            self._model.to_neuron()
        # Tensors in shared memory, which every second step uses again.
        self._inputs = [_given(plan, half) for half in memory]
        self._outputs = [_returned(plan, half) for half in memory]

    def run(self, graph: str, half: int, read: Sequence[int]) -> None:
        with doing(f"graph {graph}"):
            # It returns copies of all that rank 0 makes; its other modes take inputs that are on every rank's device.
            outputs = self._model(model_name=graph, **self._inputs[half][graph])
            for number in read:
                self._outputs[half][graph][number].copy_(outputs[number])

    def read(self, state: str) -> bytes:
        with doing(f"reading {state}"):
            parts = [self._model.read_from_neuron_buffer(state, rank) for rank in range(self._world_size)]
            return b"".join(to_array(part).tobytes() for part in parts)

    def write(self, state: str, data: bytes | bytearray) -> None:
        tensor = self._states[state]
        with doing(f"writing {state}"):
            parts = np.frombuffer(data, dtype=carrier(tensor.dtype)).reshape(self._world_size, *tensor.shape)
            for rank, part in enumerate(parts):
                self._model.write_to_neuron_buffer(from_array(part.copy(), tensor.dtype), state, rank)

    def _add(self, name: str, graph: Graph, every: Sequence[str]) -> None:
        import torch
        from neuronx_distributed.trace import model_builder_utils as artifacts
        from torch_neuronx.proto import metaneff_pb2

        examples = {
            each.name: torch.zeros(each.shape, dtype=getattr(torch, each.dtype))
            for each in graph.inputs
            if each.role == "input"
        }
        given = [each for each in every if each in examples]
        traced = artifacts.TraceArtifacts(
            hlo=None,
            metaneff=build_metaneff(graph, metaneff_pb2),
            flattener=_Reorder([given.index(each) for each in examples]),
            packer=list,
            weight_name_to_idx={},
            weight_names_to_skip=set(),
            provided_args=[artifacts.ProvidedArgInfo(each, False, examples[each]) for each in given],
            model_params=[artifacts.ModelParamInfo(each, False) for each in every],
        )
        self._model.add(name, traced, artifacts.CompilationArtifacts(graph.neff))


def _given(plan: RankPlan, memory: np.ndarray) -> dict[str, dict[str, Any]]:
    """Each graph's inputs, in shared memory, by name."""
    return {
        name: {each.name: from_array(each.view(memory), each.dtype) for each in graph.inputs if each.role == "input"}
        for name, graph in plan.graphs.items()
    }


def _returned(plan: RankPlan, memory: np.ndarray) -> dict[str, list[Any]]:
    """Each graph's outputs that are no states, in shared memory."""
    return {
        name: [from_array(each.view(memory), each.dtype) for each in graph.outputs if each.alias_of is None]
        for name, graph in plan.graphs.items()
    }


class _Reorder:
    """Puts a step's inputs, which NxDModel passes in the order of all graphs' inputs, into the graph's own order."""

    def __init__(self, order: Sequence[int]) -> None:
        self.layout: Sequence[int] = tuple(order)
        self.exclude = None

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        return [inputs[index] for index in self.layout]


def input_names(graphs: Iterable[Graph]) -> list[str]:
    """The inputs of all graphs by name, each once: NxDModel has one signature for all of them."""
    names = (each.name for graph in graphs for each in graph.inputs if each.role == "input")
    return list(dict.fromkeys(names))
