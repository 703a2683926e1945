# SPDX-License-Identifier: Apache-2.0
"""What the C++ library of torch-neuronx does: a graph on all ranks of one process."""

from __future__ import annotations

import math
from typing import Any

import torch
from fake_neuron.core import Memory, Program

from .proto import metaneff_pb2


_TYPES = metaneff_pb2.MetaTensor.Type
_TORCH_TYPES = {
    "FLOAT": torch.float32, "INT32": torch.int32, "UINT8": torch.uint8, "INT8": torch.int8, "BOOL": torch.bool,
    "INT64": torch.int64, "FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16, "INT16": torch.int16, "F8E4M3FN": torch.float8_e4m3fn,
}  # fmt: skip


def torch_type(data_type: int) -> torch.dtype:
    return _TORCH_TYPES[metaneff_pb2.MetaTensor.DataType.Name(data_type)]


class DeviceTensor:
    """A tensor on device privateuseone:<rank>."""

    def __init__(self, shape: Any, dtype: torch.dtype, rank: int) -> None:
        self.memory = Memory(math.prod(shape) * dtype.itemsize, rank)
        self.shape, self.dtype = torch.Size(shape), dtype

    def copy_(self, src: torch.Tensor) -> DeviceTensor:
        if src.shape != self.shape or src.dtype != self.dtype:
            raise RuntimeError(f"{src.dtype} {list(src.shape)} copied to {self.dtype} {list(self.shape)}")
        self.memory.write(src.contiguous().reshape(-1).view(torch.uint8).numpy())
        return self

    def cpu(self) -> torch.Tensor:
        return torch.from_numpy(self.memory.read()).view(self.dtype).view(self.shape)


def parallel_load(checkpoint: list[dict[str, torch.Tensor]]) -> list[dict[str, DeviceTensor]]:
    loaded = []
    for rank, tensors in enumerate(checkpoint):
        if any(tensor.device.type != "cpu" for tensor in tensors.values()):
            raise RuntimeError("Expected CPU tensors")
        loaded.append({name: DeviceTensor(each.shape, each.dtype, rank).copy_(each) for name, each in tensors.items()})
    return loaded


class SPMDModel:
    """Fake of torch.classes.neuron.SPMDModel; TorchScript classes take positional arguments."""

    def __init__(self, neff: bytes, metaneff: bytes, local_ranks_size: int, world_size: int, /) -> None:
        if not isinstance(neff, bytes) or not isinstance(metaneff, bytes):
            raise TypeError("NEFF and MetaNeff are bytes")
        self._metaneff = metaneff_pb2.MetaNeff()
        self._metaneff.ParseFromString(metaneff)
        self._programs = [Program(neff, "graph", rank, rank, world_size) for rank in range(local_ranks_size)]
        self._check_interface()
        self._bound: list[dict[int, Memory]] = []

    def _check_interface(self) -> None:
        module, described = self._programs[0].module, self._metaneff
        for kind, tensors, inside in (
            ("input", described.input_tensors, module.inputs),
            ("output", described.output_tensors, module.outputs),
        ):
            names = [tensor.name.decode() for tensor in tensors]
            if names != [f"{kind}{index}" for index in range(len(inside))] or names != [
                each.neff_name for each in inside
            ]:
                raise RuntimeError(f"Failed to add neuron tensor to the {kind} set: {names[:3]}")
            for tensor, each in zip(tensors, inside, strict=True):
                if tuple(tensor.shape) != each.shape or torch_type(tensor.data_type) != getattr(torch, each.dtype):
                    raise RuntimeError(f"Expected tensor.sizes() == sizes of {each.name}")
        if dict(described.output_aliases_to) != module.aliases:
            raise RuntimeError("key not found: the aliases differ")
        types = [tensor.type for tensor in described.input_tensors]
        if types != sorted(types):
            raise RuntimeError("user inputs come before states and weights")

    def initialize(self, states: list, weights: list, start_rank: int, /) -> None:
        sources = {_TYPES.INPUT_STATE: states, _TYPES.INPUT_WEIGHT: weights}
        for rank in range(len(self._programs)):
            bound = {}
            for index, tensor in enumerate(self._metaneff.input_tensors):
                if tensor.type != _TYPES.USER_INPUT:
                    bound[index] = sources[tensor.type][rank][tensor.checkpoint_key.decode()].memory
            self._bound.append(bound)

    def forward(self, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """Copies inputs to all ranks; returns rank 0's results that are no states."""
        outputs = [self._run(rank, inputs) for rank in range(len(self._programs))]
        return outputs[0]

    def _run(self, rank: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        arguments = []
        user = iter(inputs)
        for index, tensor in enumerate(self._metaneff.input_tensors):
            memory = self._bound[rank].get(index)
            if memory is None:
                memory = DeviceTensor(tensor.shape, torch_type(tensor.data_type), rank).copy_(next(user)).memory
            arguments.append(memory)
        if next(user, None) is not None:
            raise RuntimeError("Expected npts->impl()->size() == tensors.size()")
        aliases = self._metaneff.output_aliases_to
        fresh = {
            index: DeviceTensor(tensor.shape, torch_type(tensor.data_type), rank)
            for index, tensor in enumerate(self._metaneff.output_tensors)
            if index not in aliases
        }
        results = [
            fresh[index].memory if index in fresh else arguments[aliases[index]]
            for index in range(len(self._metaneff.output_tensors))
        ]
        self._programs[rank].execute(arguments, results)
        return [tensor.cpu() for tensor in fresh.values()]
