# SPDX-License-Identifier: Apache-2.0
"""Runs NEFFs through nrtpy, the Neuron Runtime without a framework; data passes as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .failures import doing
from .plan import Graph, Tensor, carrier


# The compiler may name a parameter that is also a result like this.
_ALIASED = ".must_alias_input"


class NrtDevice:
    """One logical core of nrtpy's runtime; handles are NrtpyTensor."""

    def __init__(self, rank: int, world_size: int) -> None:
        with doing("starting nrtpy"):
            import nrtpy
        self._nrtpy = nrtpy
        self._rank, self._world_size = rank, world_size

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        return self._nrtpy.NrtpyTensor.from_numpy(np.empty(shape, dtype=carrier(dtype)), name=name, core_id=0)

    def write(self, handle: Any, array: np.ndarray, dtype: str) -> None:
        handle.write_from_numpy(array)

    def read(self, handle: Any, dtype: str) -> np.ndarray:
        return np.asarray(handle.numpy())

    def load(self, graph: Graph, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], Any]:
        neff = Path(graph.neff)
        model = self._nrtpy.NrtpyModel.load_from_neff(
            neff,
            name=neff.stem,
            core_id=0,
            cc_enabled=self._world_size > 1,
            rank_id=self._rank,
            world_size=self._world_size,
        )
        names = _names(neff, "input", graph.inputs, model.input_tensors_info)
        results = _names(neff, "output", graph.outputs, model.output_tensors_info)
        return partial(
            model, inputs=dict(zip(names, inputs, strict=True)), outputs=dict(zip(results, outputs, strict=True))
        )


def _names(neff: Path, kind: str, tensors: Sequence[Tensor], found: Mapping[str, Any]) -> list[str]:
    """What the compiled graph calls its tensors, in the order of our description."""
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
