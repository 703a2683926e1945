# SPDX-License-Identifier: Apache-2.0
"""Graphs on one logical core, through nrtpy or libtorch_neuronx_lite.

Weights and states are on it once; inputs and outputs are in memory that every step uses again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .plan import RankGraph, RankPlan, RankTensor, carrier, from_array, to_array
from .wire import doing


class _Bound(NamedTuple):
    """A loaded graph, with the handles of what a step brings and takes, and views of them in both halves of shared memory."""

    inputs: list[tuple[Any, list[np.ndarray], str]]
    outputs: list[tuple[Any, list[np.ndarray], str]]
    run: Callable[[], Any]


class CoreGraphs:
    """Loaded graphs on one core; `memory` is `[HALVES, bytes]`, which all processes map."""

    def __init__(self, device: NrtDevice | LiteDevice, plan: RankPlan, memory: np.ndarray) -> None:
        self._device, self._memory = device, memory
        self._answers = plan.ranks == (0,)
        self._states = plan.states()
        self._kept: dict[str, Any] = {}
        self._shared: dict[Any, Any] = {}
        with doing("loading the weights"):
            for weight in plan.weights[0]:
                self._kept |= dict.fromkeys(
                    weight.names, self._upload_tensor(weight.names[0], weight.read_array(), weight.dtype)
                )
            for name, state in self._states.items():
                zeros = np.zeros(state.shape, dtype=carrier(state.dtype))
                self._kept[name] = self._upload_tensor(name, zeros, state.dtype)
        self._graphs = {}
        for name, graph in plan.graphs.items():
            with doing(f"loading graph {name}"):
                self._graphs[name] = self._load_graph(graph)

    def run_step(self, graph: str, half: int, read: Sequence[int]) -> None:
        """Run a step on the inputs in a half of shared memory; the process with rank 0 writes outputs there.

        `read` are the wanted outputs, by their numbers among those that are no states.
        """
        bound, device = self._graphs[graph], self._device
        for handle, shared, dtype in bound.inputs:
            device.write_tensor(handle, shared[half], dtype)
        bound.run()
        for number in read if self._answers else ():
            handle, shared, dtype = bound.outputs[number]
            np.copyto(_flat_bytes(shared[half]), _flat_bytes(device.read_tensor(handle, dtype)))

    def read_state(self, state: str) -> bytes:
        """Return a state of each rank that the process holds, one after the other."""
        return _flat_bytes(self._device.read_tensor(self._kept[state], self._states[state].dtype)).tobytes()

    def write_state(self, state: str, data: bytes | bytearray) -> None:
        """Replace a state's values; `data` as `read_state` gives it."""
        tensor = self._states[state]
        array = np.frombuffer(data, dtype=carrier(tensor.dtype)).reshape(tensor.shape)
        self._device.write_tensor(self._kept[state], array, tensor.dtype)

    def _upload_tensor(self, name: str, array: np.ndarray, dtype: str) -> Any:
        handle = self._device.allocate_tensor(name, array.shape, dtype)
        self._device.write_tensor(handle, array, dtype)
        return handle

    def _load_graph(self, graph: RankGraph) -> _Bound:
        inputs, outputs = ([self._find_handle(each) for each in side] for side in (graph.inputs, graph.outputs))
        taken, returned = (
            [
                (handle, [each.view(half) for half in self._memory], each.dtype)
                for handle, each in zip(handles, side, strict=True)
                if each.place is not None
            ]
            for handles, side in ((inputs, graph.inputs), (outputs, graph.outputs))
        )
        return _Bound(taken, returned, self._device.load_graph(graph, inputs, outputs))

    def _find_handle(self, tensor: RankTensor) -> Any:
        """Return the handle of a weight or a state, or memory of a step, which graphs share: one runs at a time."""
        if tensor.place is None:  # A state's new value is the state: both ends of the graph are bound to one tensor.
            return self._kept[tensor.alias_of or tensor.name]
        key = (tensor.name, tensor.shape, tensor.dtype)
        if key not in self._shared:
            self._shared[key] = self._device.allocate_tensor(*key)
        return self._shared[key]


def _flat_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array in a row: a view where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class NrtDevice:
    """One logical core of nrtpy, the Neuron Runtime without a framework. Handles of tensors in its memory are NrtpyTensor."""

    def __init__(self, rank: int, world_size: int) -> None:
        with doing("starting nrtpy"):
            import nrtpy
        self._nrtpy = nrtpy
        self._rank, self._world_size = rank, world_size

    def allocate_tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a handle to new memory of any contents."""
        return self._nrtpy.NrtpyTensor.from_numpy(np.empty(shape, dtype=carrier(dtype)), name=name, core_id=0)

    def write_tensor(self, handle: Any, array: np.ndarray, dtype: str) -> None:
        """Copy an array of the same shape and size into device memory."""
        handle.write_from_numpy(array)

    def read_tensor(self, handle: Any, dtype: str) -> np.ndarray:
        """Return a copy on the host; its bytes count, its type may be any."""
        return np.asarray(handle.numpy())

    def load_graph(self, graph: RankGraph, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], Any]:
        """Load a graph; return the call that runs it on these handles and returns when it has ended."""
        neff = Path(graph.neff)
        model = self._nrtpy.NrtpyModel.load_from_neff(
            neff,
            name=neff.stem,
            core_id=0,
            cc_enabled=self._world_size > 1,
            rank_id=self._rank,
            world_size=self._world_size,
        )
        names = _match_names(neff, "input", graph.inputs, model.input_tensors_info)
        results = _match_names(neff, "output", graph.outputs, model.output_tensors_info)
        return partial(
            model, inputs=dict(zip(names, inputs, strict=True)), outputs=dict(zip(results, outputs, strict=True))
        )


def _match_names(neff: Path, kind: str, tensors: Sequence[RankTensor], found: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors in the compiled graph, in the order of our description."""
    names = []
    for index, tensor in enumerate(tensors):
        plain = (f"{kind}{index}", tensor.name)
        # The compiler may name a parameter that is also a result like the latter two.
        candidates = (*plain, *(each + ".must_alias_input" for each in plain))
        name = next((each for each in candidates if each in found), None)
        if name is None:
            raise RuntimeError(
                f"{neff} has no {kind} {index} ({tensor.name}) but {', '.join(list(found)[:8])}; export the model again"
            )
        if found[name].size != tensor.nbytes:
            raise RuntimeError(
                f"{kind} {name} of {neff} has {found[name].size:,} bytes, and {tensor.name} has {tensor.nbytes:,}; "
                f"export the model again"
            )
        names.append(name)
    return names


class LiteDevice:
    """One logical core as torch's device `neuron:<rank>`; handles are torch tensors there, methods those of `NrtDevice`."""

    def __init__(self, rank: int, world_size: int) -> None:
        with doing("starting libtorch_neuronx_lite"):
            import libtorch_neuronx_lite  # noqa: F401  registers the device and torch.classes.neuron
            import torch
        self._torch: Any = torch
        self._rank, self._world_size = rank, world_size

    def allocate_tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=f"neuron:{self._rank}")

    def write_tensor(self, handle: Any, array: np.ndarray, dtype: str) -> None:
        handle.copy_(from_array(array, dtype))

    def read_tensor(self, handle: Any, dtype: str) -> np.ndarray:
        return to_array(handle.cpu())

    def load_graph(self, graph: RankGraph, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], Any]:
        # The process sees one core, its own, so the graph starts at core 0; rank and world size join the collectives.
        executor = self._torch.classes.neuron.Executor(graph.neff, 0, self._rank, self._world_size)
        return partial(executor.execute, tuple(inputs), list(outputs))
