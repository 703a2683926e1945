# SPDX-License-Identifier: Apache-2.0
"""NEFFs through neuronx-distributed's NxDModel: all ranks in this process (Inferentia2, Trainium1, Trainium2).

The model object is built from NEFF and MetaNeff; its own file format, a pickle that other versions cannot read, is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .plan import RankGraph, RankPlan, carrier
from .wire import doing


class NxDGraphs:
    """Loaded graphs of all ranks; methods as those of `CoreGraphs`."""

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
        # NxDModel has one signature for all graphs: the inputs of all by name, each once.
        graphs = plan.graphs.values()
        names = list(dict.fromkeys(each.name for graph in graphs for each in graph.inputs if each.role == "input"))
        for name, graph in plan.graphs.items():
            with doing(f"loading graph {name}"):
                self._add_graph(name, graph, names)
        with doing("loading the weights"):
            self._model.set_weights(
                [
                    {name: _from_array(each.read_array(), each.dtype) for each in weights for name in each.names}
                    for weights in plan.weights
                ]
            )
            self._model.to_neuron()
        # Inputs and outputs of each graph in shared memory, half by half, which every second step uses again.
        self._shared = [
            {
                name: [
                    {each.name: _from_array(each.view(half), each.dtype) for each in side if each.place is not None}
                    for side in (graph.inputs, graph.outputs)
                ]
                for name, graph in plan.graphs.items()
            }
            for half in memory
        ]

    def run_step(self, graph: str, half: int, read: Sequence[int]) -> None:
        inputs, outputs = self._shared[half][graph]
        # It returns copies of all that rank 0 makes; its other modes take inputs that are on every rank's device.
        results, shared = self._model(model_name=graph, **inputs), list(outputs.values())
        for number in read:
            shared[number].copy_(results[number])

    def run_probe(self, graph: str) -> bytes:
        inputs, _ = self._shared[0][graph]
        return b"".join(_to_array(each).tobytes() for each in self._model(model_name=graph, **inputs))

    def read_state(self, state: str) -> bytes:
        parts = [self._model.read_from_neuron_buffer(state, rank) for rank in range(self._world_size)]
        return b"".join(_to_array(part).tobytes() for part in parts)

    def write_state(self, state: str, data: bytes | bytearray) -> None:
        tensor = self._states[state]
        parts = np.frombuffer(data, dtype=carrier(tensor.dtype)).reshape(self._world_size, *tensor.shape)
        for rank, part in enumerate(parts):
            self._model.write_to_neuron_buffer(_from_array(part.copy(), tensor.dtype), state, rank)

    def _add_graph(self, name: str, graph: RankGraph, every: Sequence[str]) -> None:
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


class _Reorder:
    """A reordering of NxDModel's inputs, which follow all graphs' inputs, to a graph's own order."""

    def __init__(self, order: Sequence[int]) -> None:
        self.layout: Sequence[int] = tuple(order)
        self.exclude = None

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        return [inputs[index] for index in self.layout]


_TYPES = {"input": "USER_INPUT", "state": "INPUT_STATE", "weight": "INPUT_WEIGHT"}
_DATA_TYPES = {
    each: each.upper() for each in ("bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
} | {"float32": "FLOAT", "float8_e4m3fn": "F8E4M3FN"}  # fmt: skip


def build_metaneff(graph: RankGraph, schema: Any) -> Any:
    """Build the MetaNeff message that torch-neuronx makes when it traces: user inputs, states and weights, in this order.

    Raise ValueError where parameters are in another order, or have a type that the runtime, of which `schema` is metaneff_pb2, lacks.
    """
    roles = [binding.role for binding in graph.inputs]
    if roles != sorted(roles, key=list(_TYPES).index):
        raise ValueError(
            "neuronx-distributed takes inputs before states before weights; lower the graph in this order"
        )
    message = schema.MetaNeff()
    for index, binding in enumerate(graph.inputs):
        tensor = _add_tensor(message.input_tensors, f"input{index}", binding, schema)
        tensor.type = getattr(schema.MetaTensor.Type, _TYPES[binding.role])
        key = "user_input_key" if binding.role == "input" else "checkpoint_key"
        setattr(tensor, key, binding.name.encode())
    positions = {binding.name: index for index, binding in enumerate(graph.inputs)}
    for index, output in enumerate(graph.outputs):
        _add_tensor(message.output_tensors, f"output{index}", output, schema)
        if output.alias_of is not None:
            message.output_aliases_to[index] = positions[output.alias_of]
    return message


def _add_tensor(tensors: Any, name: str, binding: Any, schema: Any) -> Any:
    if binding.dtype not in _DATA_TYPES:
        raise ValueError(
            f"{binding.name} has type {binding.dtype}, which torch-neuronx does not take; use {', '.join(_DATA_TYPES)}"
        )
    tensor = tensors.add()
    tensor.name = name.encode()
    tensor.shape.extend(binding.shape)
    tensor.data_type = getattr(schema.MetaTensor.DataType, _DATA_TYPES[binding.dtype])
    return tensor


def _from_array(array: np.ndarray, dtype: str) -> Any:
    """Return a tensor of torch's type of that name in the array's memory."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).view(getattr(torch, dtype)).view(array.shape)


def _to_array(tensor: Any) -> np.ndarray:
    """Return the bytes of a tensor on the CPU."""
    import torch

    array: np.ndarray = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array
