# SPDX-License-Identifier: Apache-2.0
"""Graphs on one logical core: weights and states on it once, inputs and outputs in memory that every step uses again.

What is done to the device goes through `Device`, of which each runtime has an implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..graph_io import COPY_SLOT, GraphIO, InputBinding, OutputBinding
from ..sdk.runtime_errors import NeuronRuntimeError, translated
from .load_plan import LoadPlan, slot_copy_inputs
from .rank_weights import read_rank_weights


class Device(Protocol):
    """One logical core, as a runtime sees it. A handle is a tensor in its memory, of a kind that only the runtime knows."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """A handle to new memory of any contents."""

    def write(self, handle: Any, tensor: Tensor) -> None:
        """Copies a CPU tensor of the same shape and type into device memory."""

    def read(self, handle: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A copy on the CPU."""

    def load(self, neff: Path, io: GraphIO, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], Any]:
        """Loads a graph; the call that is returned runs it on these handles and returns when it has ended."""


class _Bound(NamedTuple):
    """A loaded graph; `inputs` has None where the graph does not use what a step passes."""

    inputs: tuple[Any | None, ...]
    outputs: tuple[tuple[Any, OutputBinding], ...]
    run: Callable[[], Any]


class DeviceExecutable:
    """Loaded graphs on one core; see `Executable`."""

    def __init__(self, device: Device, plan: LoadPlan, rank: int = 0) -> None:
        self._device = device
        self._state_bindings = plan.states()
        with translated("loading the weights"):
            self._weights = self._upload_weights(plan, rank)
            self._states = {name: self._zeros(binding) for name, binding in self._state_bindings.items()}
        self._shared: dict[Any, Any] = {}
        self._graphs = {}
        for name, io in plan.graphs.items():
            with translated(f"loading graph {name}"):
                self._graphs[name] = self._load(plan.neff(name), io, plan.call(name))
        self._ended: NeuronRuntimeError | None = None

    def run(self, graph: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """As `Executable.run`.

        Raises:
            NeuronRuntimeError: the device failed; where it cannot recover, all later calls raise the same.
        """
        if self._ended is not None:
            raise self._ended
        bound, device = self._graphs[graph], self._device
        try:
            with translated(f"graph {graph}"):
                for handle, tensor in zip(bound.inputs, inputs, strict=True):
                    if handle is not None:
                        device.write(handle, tensor)
                bound.run()
                return [device.read(handle, each.shape, _dtype(each)) for handle, each in bound.outputs]
        except NeuronRuntimeError as error:
            self._ended = None if error.recoverable else error
            raise

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        self.run(COPY_SLOT, slot_copy_inputs(source, destination, length))

    def read_state(self, name: str) -> Tensor:
        binding = self._state_bindings[name]
        with translated(f"reading {name}"):
            return self._device.read(self._states[name], binding.shape, _dtype(binding))

    def write_state(self, name: str, tensor: Tensor) -> None:
        binding = self._state_bindings[name]
        if tuple(tensor.shape) != binding.shape:
            raise ValueError(f"state {name} has shape {list(binding.shape)}, not {list(tensor.shape)}")
        with translated(f"writing {name}"):
            self._device.write(self._states[name], tensor.to(_dtype(binding)))

    def _upload_weights(self, plan: LoadPlan, rank: int) -> dict[str, Any]:
        handles: dict[str, Any] = {}
        for names, tensor in read_rank_weights(plan, rank):
            handle = self._device.allocate(names[0], tuple(tensor.shape), tensor.dtype)
            self._device.write(handle, tensor)
            handles |= dict.fromkeys(names, handle)
        return handles

    def _zeros(self, binding: InputBinding) -> Any:
        handle = self._device.allocate(binding.name, binding.shape, _dtype(binding))
        self._device.write(handle, torch.zeros(binding.shape, dtype=_dtype(binding)))
        return handle

    def _load(self, neff: Path, io: GraphIO, call: Sequence[str]) -> _Bound:
        inputs = [self._input(binding) for binding in io.inputs]
        # A state's new value is the state: both ends of the graph are bound to one tensor.
        outputs = [self._reuse(each) if each.alias_of is None else self._states[each.alias_of] for each in io.outputs]
        positions = {binding.name: index for index, binding in enumerate(io.inputs)}
        return _Bound(
            inputs=tuple(inputs[positions[name]] if name in positions else None for name in call),
            outputs=tuple(
                (handle, each) for handle, each in zip(outputs, io.outputs, strict=True) if not each.alias_of
            ),
            run=self._device.load(neff, io, inputs, outputs),
        )

    def _input(self, binding: InputBinding) -> Any:
        if binding.role == "weight":
            return self._weights[binding.name]
        return self._states[binding.name] if binding.role == "state" else self._reuse(binding)

    def _reuse(self, binding: InputBinding | OutputBinding) -> Any:
        """Memory for a step's input or output; graphs whose tensors are alike have it in common, as one runs at a time."""
        key = (binding.name, binding.shape, binding.dtype)
        if key not in self._shared:
            self._shared[key] = self._device.allocate(binding.name, binding.shape, _dtype(binding))
        return self._shared[key]


def _dtype(binding: InputBinding | OutputBinding) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, binding.dtype)
    return dtype


def byte_size(binding: InputBinding | OutputBinding) -> int:
    """Bytes of a tensor on the device."""
    return math.prod(binding.shape) * _dtype(binding).itemsize
