# SPDX-License-Identifier: Apache-2.0
"""Runs NEFFs through the torch extension of libtorch_neuronx_lite (Trainium2 and later), with the torch of its environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from .failures import doing
from .plan import Graph
from .torch_arrays import from_array, to_array


class LiteDevice:
    """One logical core as torch's device `neuron:<rank>`; handles are torch tensors there."""

    def __init__(self, rank: int, world_size: int) -> None:
        with doing("starting libtorch_neuronx_lite"):
            import libtorch_neuronx_lite  # noqa: F401  registers the device and torch.classes.neuron
            import torch
        self._torch: Any = torch
        self._rank, self._world_size = rank, world_size
        self._device = f"neuron:{rank}"

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=self._device)

    def write(self, handle: Any, array: np.ndarray, dtype: str) -> None:
        handle.copy_(from_array(array, dtype))

    def read(self, handle: Any, dtype: str) -> np.ndarray:
        return to_array(handle.cpu())

    def load(self, graph: Graph, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], Any]:
        # The process sees one core, its own, so the graph starts at core 0; rank and world size join the collectives.
        executor = self._torch.classes.neuron.Executor(graph.neff, 0, self._rank, self._world_size)
        return partial(executor.execute, tuple(inputs), list(outputs))
