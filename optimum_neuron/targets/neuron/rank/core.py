# SPDX-License-Identifier: Apache-2.0
"""Graphs on one logical core: weights and states on it once, inputs and outputs in memory that every step uses again.

Each runtime has an implementation of `Device`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from .plan import RankGraph, RankPlan, RankTensor, RankWeight, carrier
from .wire import doing


class Device(Protocol):
    """A logical core as a runtime sees it. A handle is a tensor in its memory, of a kind that only the runtime knows."""

    def allocate_tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a handle to new memory of any contents."""

    def write_tensor(self, handle: Any, array: np.ndarray, dtype: str) -> None:
        """Copy an array of the same shape and size into device memory."""

    def read_tensor(self, handle: Any, dtype: str) -> np.ndarray:
        """Return a copy on the host; its bytes count, its type may be any."""

    def load_graph(self, graph: RankGraph, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], Any]:
        """Load a graph; return the call that runs it on these handles and returns when it has ended."""


class Graphs(Protocol):
    """Loaded graphs of the ranks that a process holds."""

    def run_step(self, graph: str, half: int, read: Sequence[int]) -> None:
        """Run a step on the inputs in a half of shared memory; a process with rank 0 writes outputs there.

        Args:
            read: wanted outputs, by their numbers among those that are no states.
        """

    def read_state(self, state: str) -> bytes:
        """Return a state of each rank, one after the other."""

    def write_state(self, state: str, data: bytes | bytearray) -> None:
        """Replace a state's values; `data` as `read_state` gives it."""


class _Bound(NamedTuple):
    """A loaded graph, with handles and their views in both halves of shared memory."""

    inputs: tuple[tuple[Any, list[np.ndarray], str], ...]
    outputs: tuple[tuple[Any, list[np.ndarray], str], ...]
    run: Callable[[], Any]


class CoreGraphs:
    """Loaded graphs on one core; see `Graphs`.

    Args:
        memory: `[HALVES, bytes]`.
    """

    def __init__(self, device: Device, plan: RankPlan, memory: np.ndarray) -> None:
        self._device, self._memory = device, memory
        self._answers = plan.ranks == (0,)
        self._state_tensors = plan.states()
        with doing("loading the weights"):
            self._weights = self._upload_weights(plan.weights[0])
            self._states = {name: self._allocate_state(each) for name, each in self._state_tensors.items()}
        self._shared: dict[Any, Any] = {}
        self._graphs = {}
        for name, graph in plan.graphs.items():
            with doing(f"loading graph {name}"):
                self._graphs[name] = self._load_graph(graph)

    def run_step(self, graph: str, half: int, read: Sequence[int]) -> None:
        bound, device = self._graphs[graph], self._device
        with doing(f"graph {graph}"):
            for handle, shared, dtype in bound.inputs:
                device.write_tensor(handle, shared[half], dtype)
            bound.run()
            # Only rank 0 reads results back, and only those that the caller wants.
            for number in read if self._answers else ():
                handle, shared, dtype = bound.outputs[number]
                np.copyto(_flat_bytes(shared[half]), _flat_bytes(device.read_tensor(handle, dtype)))

    def read_state(self, state: str) -> bytes:
        with doing(f"reading {state}"):
            return _flat_bytes(
                self._device.read_tensor(self._states[state], self._state_tensors[state].dtype)
            ).tobytes()

    def write_state(self, state: str, data: bytes | bytearray) -> None:
        tensor = self._state_tensors[state]
        with doing(f"writing {state}"):
            array = np.frombuffer(data, dtype=carrier(tensor.dtype)).reshape(tensor.shape)
            self._device.write_tensor(self._states[state], array, tensor.dtype)

    def _upload_weights(self, weights: Sequence[RankWeight]) -> dict[str, Any]:
        handles: dict[str, Any] = {}
        for weight in weights:
            handle = self._device.allocate_tensor(weight.names[0], weight.shape, weight.dtype)
            self._device.write_tensor(handle, weight.read_array(), weight.dtype)
            handles |= dict.fromkeys(weight.names, handle)
        return handles

    def _allocate_state(self, tensor: RankTensor) -> Any:
        handle = self._device.allocate_tensor(tensor.name, tensor.shape, tensor.dtype)
        self._device.write_tensor(handle, np.zeros(tensor.shape, dtype=carrier(tensor.dtype)), tensor.dtype)
        return handle

    def _load_graph(self, graph: RankGraph) -> _Bound:
        inputs = [self._input_handle(each) for each in graph.inputs]
        # A state's new value is the state: both ends of the graph are bound to one tensor.
        outputs = [
            self._reuse_memory(each) if each.alias_of is None else self._states[each.alias_of]
            for each in graph.outputs
        ]
        returned = [pair for pair in zip(outputs, graph.outputs, strict=True) if pair[1].alias_of is None]
        return _Bound(
            inputs=tuple(
                (handle, self._shared_views(each), each.dtype)
                for handle, each in zip(inputs, graph.inputs, strict=True)
                if each.role == "input"
            ),
            outputs=tuple((handle, self._shared_views(each), each.dtype) for handle, each in returned),
            run=self._device.load_graph(graph, inputs, outputs),
        )

    def _shared_views(self, tensor: RankTensor) -> list[np.ndarray]:
        return [tensor.view(half) for half in self._memory]

    def _input_handle(self, tensor: RankTensor) -> Any:
        if tensor.role == "weight":
            return self._weights[tensor.name]
        return self._states[tensor.name] if tensor.role == "state" else self._reuse_memory(tensor)

    def _reuse_memory(self, tensor: RankTensor) -> Any:
        """Return memory for a step's input or output; graphs share equal tensors, as one runs at a time."""
        key = (tensor.name, tensor.shape, tensor.dtype)
        if key not in self._shared:
            self._shared[key] = self._device.allocate_tensor(tensor.name, tensor.shape, tensor.dtype)
        return self._shared[key]


def _flat_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array in a row: a view where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
