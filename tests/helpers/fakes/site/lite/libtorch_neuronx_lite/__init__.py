# SPDX-License-Identifier: Apache-2.0
"""Fake of libtorch_neuronx_lite: importing it registers the device `neuron` and torch.classes.neuron."""

from __future__ import annotations

import functools
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from fake_neuron.core import Memory, Program


if "torch_neuronx" in sys.modules:
    raise ImportError("torch_neuronx and libtorch_neuronx_lite both register torch.classes.neuron")
if "NEURON_RT_VISIBLE_CORES" not in os.environ and "NEURON_RT_NUM_CORES" not in os.environ:
    raise RuntimeError("the process would take all cores")


class NeuronTensor:
    """A tensor in device memory, with what a torch tensor there can do without leaving it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        size = math.prod(shape) * dtype.itemsize
        self.memory = Memory(size, int(device.partition(":")[2] or 0))
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device

    def copy_(self, src: torch.Tensor, non_blocking: bool = False) -> NeuronTensor:
        if src.shape != self.shape or src.dtype != self.dtype:
            raise RuntimeError(f"{src.dtype} {list(src.shape)} copied to {self.dtype} {list(self.shape)}")
        self.memory.write(src.contiguous().reshape(-1).view(torch.uint8).numpy())
        return self

    def cpu(self) -> torch.Tensor:
        return torch.from_numpy(self.memory.read()).view(self.dtype).view(self.shape)


class Executor:
    """Fake of torch.classes.neuron.Executor; TorchScript classes take positional arguments."""

    def __init__(self, neff_path: str, start_nc: int, g_device_id: int, g_device_count: int, /) -> None:
        if not isinstance(neff_path, str) or start_nc != 0:
            raise TypeError(f"Executor({neff_path!r}, {start_nc!r})")
        path = Path(neff_path)
        if not path.is_file():
            raise RuntimeError(f"Failed to open {neff_path}")
        self._program = Program(path.read_bytes(), path.stem, g_device_id, g_device_id, g_device_count)
        # Tensors are bound by position, under the names that the compiler gives by default.
        for kind, tensors in (("input", self._program.module.inputs), ("output", self._program.module.outputs)):
            for index, tensor in enumerate(tensors):
                if tensor.neff_name != f"{kind}{index}":
                    raise RuntimeError(f"NRT Error NRT_INVALID(2): the NEFF has {tensor.neff_name}, no {kind}{index}")

    def execute(self, inputs: tuple[Any, ...], outputs: list[Any], /) -> None:
        if not isinstance(inputs, tuple) or not isinstance(outputs, list):
            raise TypeError(f"execute({type(inputs).__name__}, {type(outputs).__name__})")
        if not all(isinstance(each, NeuronTensor) for each in (*inputs, *outputs)):
            raise RuntimeError("Expected tensors on device neuron")
        self._program.execute([each.memory for each in inputs], [each.memory for each in outputs])


_empty = torch.empty


@functools.wraps(_empty)
def _empty_on_device(*args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device")
    if not str(device).startswith("neuron"):
        return _empty(*args, **kwargs)
    shape = args[0] if isinstance(args[0], (tuple, list)) else args
    return NeuronTensor(tuple(shape), kwargs["dtype"], str(device))


def _uninstall() -> None:
    """For tests: what importing did, undone."""
    torch.empty = _empty
    vars(torch.classes).pop("neuron", None)


torch.empty = _empty_on_device
torch.classes.neuron = types.SimpleNamespace(Executor=Executor)
