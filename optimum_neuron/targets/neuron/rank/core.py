# SPDX-License-Identifier: Apache-2.0
"""Graphs on one logical core: weights and states on it once, inputs and outputs in memory that every step uses again.

What is done to the device goes through `Device`, of which each runtime has an implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from .failures import doing
from .plan import Graph, RankPlan, Tensor, Weight, carrier


class Device(Protocol):
    """One logical core, as a runtime sees it. A handle is a tensor in its memory, of a kind that only the runtime knows."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        """A handle to new memory of any contents."""

    def write(self, handle: Any, array: np.ndarray, dtype: str) -> None:
        """Copies an array of the same shape and size into device memory."""

    def read(self, handle: Any, dtype: str) -> np.ndarray:
        """A copy on the host; its bytes count, its type may be any."""

    def load(self, graph: Graph, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], Any]:
        """Loads a graph; the call that is returned runs it on these handles and returns when it has ended."""


class Graphs(Protocol):
    """Loaded graphs of the ranks that a process holds."""

    def run(self, graph: str, half: int, read: Sequence[int]) -> None:
        """Runs a step on the inputs in a half of shared memory; where rank 0 is here, outputs are written there.

        Args:
            read: which outputs are wanted, by their numbers among those that are no states.
        """

    def read(self, state: str) -> bytes:
        """A state of each rank, one behind the other."""

    def write(self, state: str, data: bytes | bytearray) -> None:
        """Replaces a state's values; `data` as `read` gives it."""


class _Bound(NamedTuple):
    """A loaded graph, with views of both halves of shared memory beside handles."""

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
            self._weights = self._upload(plan.weights[0])
            self._states = {name: self._zeros(each) for name, each in self._state_tensors.items()}
        self._shared: dict[Any, Any] = {}
        self._graphs = {}
        for name, graph in plan.graphs.items():
            with doing(f"loading graph {name}"):
                self._graphs[name] = self._load(graph)

    def run(self, graph: str, half: int, read: Sequence[int]) -> None:
        bound, device = self._graphs[graph], self._device
        with doing(f"graph {graph}"):
            for handle, shared, dtype in bound.inputs:
                device.write(handle, shared[half], dtype)
            bound.run()
            # Only rank 0 reads results back, and only what somebody wants.
            for number in read if self._answers else ():
                handle, shared, dtype = bound.outputs[number]
                np.copyto(_bytes(shared[half]), _bytes(device.read(handle, dtype)))

    def read(self, state: str) -> bytes:
        with doing(f"reading {state}"):
            return _bytes(self._device.read(self._states[state], self._state_tensors[state].dtype)).tobytes()

    def write(self, state: str, data: bytes | bytearray) -> None:
        tensor = self._state_tensors[state]
        with doing(f"writing {state}"):
            array = np.frombuffer(data, dtype=carrier(tensor.dtype)).reshape(tensor.shape)
            self._device.write(self._states[state], array, tensor.dtype)

    def _upload(self, weights: Sequence[Weight]) -> dict[str, Any]:
        handles: dict[str, Any] = {}
        for weight in weights:
            handle = self._device.allocate(weight.names[0], weight.shape, weight.dtype)
            self._device.write(handle, weight.read(), weight.dtype)
            handles |= dict.fromkeys(weight.names, handle)
        return handles

    def _zeros(self, tensor: Tensor) -> Any:
        handle = self._device.allocate(tensor.name, tensor.shape, tensor.dtype)
        self._device.write(handle, np.zeros(tensor.shape, dtype=carrier(tensor.dtype)), tensor.dtype)
        return handle

    def _load(self, graph: Graph) -> _Bound:
        inputs = [self._input(each) for each in graph.inputs]
        # A state's new value is the state: both ends of the graph are bound to one tensor.
        outputs = [
            self._reuse(each) if each.alias_of is None else self._states[each.alias_of] for each in graph.outputs
        ]
        returned = [pair for pair in zip(outputs, graph.outputs, strict=True) if pair[1].alias_of is None]
        return _Bound(
            inputs=tuple(
                (handle, self._views(each), each.dtype)
                for handle, each in zip(inputs, graph.inputs, strict=True)
                if each.role == "input"
            ),
            outputs=tuple((handle, self._views(each), each.dtype) for handle, each in returned),
            run=self._device.load(graph, inputs, outputs),
        )

    def _views(self, tensor: Tensor) -> list[np.ndarray]:
        return [tensor.view(half) for half in self._memory]

    def _input(self, tensor: Tensor) -> Any:
        if tensor.role == "weight":
            return self._weights[tensor.name]
        return self._states[tensor.name] if tensor.role == "state" else self._reuse(tensor)

    def _reuse(self, tensor: Tensor) -> Any:
        """Memory for a step's input or output; graphs whose tensors are alike have it in common, as one runs at a time."""
        key = (tensor.name, tensor.shape, tensor.dtype)
        if key not in self._shared:
            self._shared[key] = self._device.allocate(tensor.name, tensor.shape, tensor.dtype)
        return self._shared[key]


def _bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array in a row: a view where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
