# SPDX-License-Identifier: Apache-2.0
"""Runs NEFFs through the torch extension of libtorch_neuronx_lite (Trainium2 and later)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..graph_io import GraphIO
from ..sdk.runtime_errors import starting


class ExecutorDevice:
    """One logical core as torch's device `neuron:<rank>`; handles are torch tensors there."""

    def __init__(self, rank: int, world_size: int) -> None:
        with starting("libtorch_neuronx_lite"):
            import libtorch_neuronx_lite  # noqa: F401  registers the device and torch.classes.neuron
        self._rank, self._world_size = rank, world_size
        self._device = f"neuron:{rank}"

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def write(self, handle: Any, tensor: Tensor) -> None:
        handle.copy_(tensor)

    def read(self, handle: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        copied: Tensor = handle.cpu()
        return copied

    def load(self, neff: Path, io: GraphIO, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], Any]:
        # The process sees one core, its own, so the graph starts at core 0; rank and world size join the collectives.
        executor = torch.classes.neuron.Executor(str(neff), 0, self._rank, self._world_size)
        return partial(executor.execute, tuple(inputs), list(outputs))
