# SPDX-License-Identifier: Apache-2.0
"""NEFFs through nrtpy, the Neuron Runtime without a framework; data passes as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .plan import RankGraph, RankTensor, carrier, from_array, to_array
from .wire import doing


# The compiler may name a parameter that is also a result like this.
_ALIASED = ".must_alias_input"


class NrtDevice:
    """One logical core of nrtpy's runtime; handles are NrtpyTensor."""

    def __init__(self, rank: int, world_size: int) -> None:
        with doing("starting nrtpy"):
            import nrtpy
        self._nrtpy = nrtpy
        self._rank, self._world_size = rank, world_size

    def allocate_tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        return self._nrtpy.NrtpyTensor.from_numpy(np.empty(shape, dtype=carrier(dtype)), name=name, core_id=0)

    def write_tensor(self, handle: Any, array: np.ndarray, dtype: str) -> None:
        handle.write_from_numpy(array)

    def read_tensor(self, handle: Any, dtype: str) -> np.ndarray:
        return np.asarray(handle.numpy())

    def load_graph(self, graph: RankGraph, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], Any]:
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
        candidates = (f"{kind}{index}", tensor.name, f"{kind}{index}{_ALIASED}", tensor.name + _ALIASED)
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
    """One logical core as torch's device `neuron:<rank>`; handles are torch tensors there."""

    def __init__(self, rank: int, world_size: int) -> None:
        with doing("starting libtorch_neuronx_lite"):
            import libtorch_neuronx_lite  # noqa: F401  registers the device and torch.classes.neuron
            import torch
        self._torch: Any = torch
        self._rank, self._world_size = rank, world_size
        self._device = f"neuron:{rank}"

    def allocate_tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=self._device)

    def write_tensor(self, handle: Any, array: np.ndarray, dtype: str) -> None:
        handle.copy_(from_array(array, dtype))

    def read_tensor(self, handle: Any, dtype: str) -> np.ndarray:
        return to_array(handle.cpu())

    def load_graph(self, graph: RankGraph, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], Any]:
        # The process sees one core, its own, so the graph starts at core 0; rank and world size join the collectives.
        executor = self._torch.classes.neuron.Executor(graph.neff, 0, self._rank, self._world_size)
        return partial(executor.execute, tuple(inputs), list(outputs))
