# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import torch


class NxDModel(torch.nn.Module):
    def __init__(
        self, world_size, start_rank=None, local_ranks_size=None, state_initializer=None, layout_transformer=None
    ) -> None:
        super().__init__()
        assert start_rank is None and local_ranks_size is None and layout_transformer is None
        self.world_size, self.state_initializer = world_size, state_initializer
        self.spmd_models: dict = {}
        self.flatteners: dict = {}
        self.packers: dict = {}
        self.input_shape_map: dict[str, list[str]] = {}
        self.model_params: list = []
        self.weights: list = []
        self.states: list = []
        self.loaded_on_neuron = False

    def add(self, key, trace_artifacts, compilation_artifacts):
        metaneff = trace_artifacts.metaneff.SerializeToString()
        neff, ranks = compilation_artifacts.get_neff_bytes(), self.world_size
        model = torch.classes.neuron.SPMDModel(neff, metaneff, ranks, ranks)
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
        if len(sharded_checkpoint) != self.world_size:
            raise RuntimeError("one checkpoint per rank")
        self.weights = torch.ops.neuron._parallel_load(sharded_checkpoint)

    def to_neuron(self) -> None:
        if self.loaded_on_neuron:
            return
        if self.state_initializer is not None:
            self.states = self.state_initializer()
        for model in self.spmd_models.values():
            model.initialize(self.states, self.weights, 0)
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
        if model_name not in self.input_shape_map[_route(ordered)]:
            raise AssertionError(f"{model_name} is no route of these inputs")
        outputs = self.spmd_models[model_name].forward(self.flatteners[model_name](list(ordered.values())))
        return self.packers[model_name](outputs)


def _route(tensors) -> str:
    return "(" + ", ".join(f"{name}: {list(tensor.shape)}" for name, tensor in tensors.items()) + ")"
