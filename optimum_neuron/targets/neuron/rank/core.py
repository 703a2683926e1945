# SPDX-License-Identifier: Apache-2.0
"""Graphs on one logical core, through nrtpy: the Neuron Runtime without a framework.

Weights and states are on it once; inputs and outputs are in memory that every step uses again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .plan import RankGraph, RankPlan, RankTensor, carrier
from .wire import doing


class _Bound(NamedTuple):
    """A loaded graph, with the handles of what a step brings and takes, and views of them in both halves of shared memory."""

    inputs: list[tuple[Any, list[np.ndarray]]]
    outputs: list[tuple[Any, list[np.ndarray]]]
    run: Callable[[], Any]


class CoreGraphs:
    """Loaded graphs on one core; `memory` is `[HALVES, bytes]`, which all processes map. Handles of tensors are NrtpyTensor."""

    def __init__(self, plan: RankPlan, memory: np.ndarray) -> None:
        with doing("starting nrtpy"):
            import nrtpy
        self._load_neff = partial(
            nrtpy.NrtpyModel.load_from_neff,
            core_id=0,
            cc_enabled=plan.world_size > 1,
            rank_id=plan.ranks[0],
            world_size=plan.world_size,
        )
        self._upload = partial(nrtpy.NrtpyTensor.from_numpy, core_id=0)
        self._memory, self._answers, self._states = memory, plan.ranks[0] == 0, plan.states()
        self._kept: dict[str, Any] = {}
        self._shared: dict[Any, Any] = {}
        with doing("loading the weights"):
            for weight in plan.weights[0]:
                handle = self._upload(weight.read_array(), name=weight.names[0])
                self._kept |= dict.fromkeys(weight.names, handle)
            for name, state in self._states.items():
                self._kept[name] = self._upload(np.zeros(state.shape, carrier(state.dtype)), name=name)
        self._graphs = {}
        for name, graph in plan.graphs.items():
            with doing(f"loading graph {name}"):
                self._graphs[name] = self._load_graph(graph)

    def run_step(self, graph: str, half: int, read: Sequence[int]) -> None:
        """Run a step on the inputs in a half of shared memory; the process with rank 0 writes outputs there.

        `read` are the wanted outputs, by their numbers among those that are no states.
        """
        bound = self._graphs[graph]
        for handle, shared in bound.inputs:
            handle.write_from_numpy(shared[half])
        bound.run()
        for number in read if self._answers else ():
            handle, shared = bound.outputs[number]
            np.copyto(_flat_bytes(shared[half]), _flat_bytes(handle.numpy()))

    def run_probe(self, graph: str) -> bytes:
        """Run a graph on the inputs in the first half of shared memory; return this rank's outputs, one after the other."""
        self.run_step(graph, 0, [])
        return b"".join(_flat_bytes(handle.numpy()).tobytes() for handle, _ in self._graphs[graph].outputs)

    def read_state(self, state: str) -> bytes:
        """Return a state of each rank that the process holds, one after the other."""
        return _flat_bytes(self._kept[state].numpy()).tobytes()

    def write_state(self, state: str, data: bytes | bytearray) -> None:
        """Replace a state's values; `data` as `read_state` gives it."""
        tensor = self._states[state]
        self._kept[state].write_from_numpy(np.frombuffer(data, carrier(tensor.dtype)).reshape(tensor.shape))

    def _load_graph(self, graph: RankGraph) -> _Bound:
        neff = Path(graph.neff)
        model = self._load_neff(neff, name=neff.stem)
        inputs, outputs = ([self._find_handle(each) for each in side] for side in (graph.inputs, graph.outputs))
        taken, returned = (
            [
                (handle, [each.view(half) for half in self._memory])
                for handle, each in zip(handles, side, strict=True)
                if each.place is not None
            ]
            for handles, side in ((inputs, graph.inputs), (outputs, graph.outputs))
        )
        names = _match_names(neff, "input", graph.inputs, model.input_tensors_info)
        results = _match_names(neff, "output", graph.outputs, model.output_tensors_info)
        bound = {"inputs": dict(zip(names, inputs, strict=True)), "outputs": dict(zip(results, outputs, strict=True))}
        return _Bound(taken, returned, partial(model, **bound))

    def _find_handle(self, tensor: RankTensor) -> Any:
        """Return the handle of a weight or a state, or memory of a step, which graphs share: one runs at a time."""
        if tensor.place is None:  # A state's new value is the state: both ends of the graph are bound to one tensor.
            return self._kept[tensor.alias_of or tensor.name]
        key = tensor.name, *tensor.shape, tensor.dtype
        if key not in self._shared:
            self._shared[key] = self._upload(np.empty(tensor.shape, carrier(tensor.dtype)), name=tensor.name)
        return self._shared[key]


def _flat_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array in a row, whatever its type is called: a view where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


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
