# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import torch
from torch_neuronx.proto import metaneff_pb2
from torch_neuronx.spmd import torch_type

from .base_nxd_model import StateInitializer


class NxDModel(torch.nn.Module):
    def __init__(
        self, world_size, start_rank=None, local_ranks_size=None, state_initializer=None, layout_transformer=None
    ) -> None:
        super().__init__()
        if (start_rank is None) != (local_ranks_size is None):
            raise AssertionError("start_rank and local_ranks_size belong together")
        self.world_size = world_size
        self.start_rank = start_rank or 0
        self.local_ranks_size = local_ranks_size or world_size
        self.layout_transformer = layout_transformer
        self.state_initializer = state_initializer
        self.spmd_models: dict = {}
        self.flatteners: dict = {}
        self.packers: dict = {}
        self.input_shape_map: dict[str, list[str]] = {}
        self.model_params: list = []
        self.weights: list = []
        self.states: list = []
        self.loaded_on_neuron = False

    def add(self, key, trace_artifacts, compilation_artifacts):
        described = trace_artifacts.metaneff
        if self.state_initializer is None:
            # The first graph with states decides for all of them.
            states = [
                each for each in described.input_tensors if each.type == metaneff_pb2.MetaTensor.Type.INPUT_STATE
            ]
            names = {each.checkpoint_key.decode(): each for each in states}
            if names:
                shapes = {name: list(each.shape) for name, each in names.items()}
                dtypes = {name: torch_type(each.data_type) for name, each in names.items()}
                self.state_initializer = StateInitializer(shapes, dtypes, self.local_ranks_size)
        model = torch.classes.neuron.SPMDModel(
            compilation_artifacts.get_neff_bytes(),
            described.SerializeToString(),
            self.local_ranks_size,
            self.world_size,
        )
        for program in model._programs:
            program.name = key
        self.spmd_models[key] = model
        self.model_params = self.model_params or trace_artifacts.model_params
        if self.model_params != trace_artifacts.model_params:
            raise AssertionError("The model provided appears to have a different signature")
        if not isinstance(trace_artifacts.flattener.layout, tuple):
            raise AssertionError("Expected flattener layout type to be tuple")
        trace_artifacts.flattener.layout = list(trace_artifacts.flattener.layout)
        self.flatteners[key], self.packers[key] = trace_artifacts.flattener, trace_artifacts.packer
        given = {each.param_name: each.tensor for each in trace_artifacts.provided_args}
        self.input_shape_map.setdefault(_route(given), []).append(key)
        return self

    def set_weights(self, sharded_checkpoint) -> None:
        if self.loaded_on_neuron:
            raise ValueError("use replace_weights()")
        if len(sharded_checkpoint) != self.local_ranks_size:
            raise RuntimeError("one checkpoint per rank")
        self.weights = torch.ops.neuron._parallel_load(sharded_checkpoint)

    def to_neuron(self) -> None:
        if self.loaded_on_neuron:
            return
        if self.state_initializer is not None:
            self.states = self.state_initializer()
        for model in self.spmd_models.values():
            model.initialize(self.states, self.weights, self.start_rank)
        self.loaded_on_neuron = True

    def read_from_neuron_buffer(self, buffer_key, rank):
        return self._buffer(buffer_key, rank).cpu()

    def write_to_neuron_buffer(self, tensor, buffer_key, rank) -> None:
        buffer = self._buffer(buffer_key, rank)
        if buffer.shape != tensor.shape:
            raise KeyError("Cannot write tensor of another shape")
        buffer.copy_(tensor)

    def _buffer(self, key, rank):
        if not self.loaded_on_neuron:
            raise AssertionError("Model must be loaded on neuron")
        for buffers in (self.states, self.weights):
            if len(buffers) > rank and key in buffers[rank]:
                return buffers[rank][key]
        raise KeyError(f"Could not find neuron buffer: {key} in rank {rank}")

    def forward(self, *args, model_name=None, forward_mode="default", **kwargs):
        if not self.loaded_on_neuron:
            raise RuntimeError("Model not initialized. Call set_weights() followed by to_neuron()")
        if args or forward_mode != "default":
            raise NotImplementedError("the fake knows keyword arguments of the default mode")
        known = [each.param_name for each in self.model_params]
        ordered = {name: kwargs[name] for name in known if name in kwargs}
        if len(ordered) != len(kwargs):
            raise AssertionError("Not all kwargs were parsed")
        routes = self.input_shape_map[_route(ordered)]
        if (model_name is None and len(routes) > 1) or (model_name is not None and model_name not in routes):
            raise AssertionError(f"{routes} possible routes, not {model_name}")
        name = model_name or routes[0]
        outputs = self.spmd_models[name].forward(self.flatteners[name](list(ordered.values())))
        return self.packers[name](outputs)


def _route(tensors) -> str:
    return "(" + ", ".join(f"{name}: {list(tensor.shape)}" for name, tensor in tensors.items()) + ")"
