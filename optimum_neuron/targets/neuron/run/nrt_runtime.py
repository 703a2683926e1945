# SPDX-License-Identifier: Apache-2.0
"""Runs NEFFs through nrtpy, the Neuron Runtime without a framework; data passes as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..graph_io import GraphIO, InputBinding, OutputBinding
from ..sdk.runtime_errors import starting
from .device_executable import byte_size


# Types that NumPy lacks travel as integers of their size: only the number of bytes matters to the runtime.
_CARRIERS = {torch.bfloat16: torch.int16}
# The compiler may name a parameter that is also a result like this.
_ALIASED = ".must_alias_input"


class NrtDevice:
    """One logical core of nrtpy's runtime; handles are NrtpyTensor."""

    def __init__(self, rank: int, world_size: int) -> None:
        with starting("nrtpy"):
            import nrtpy
        self._nrtpy = nrtpy
        self._rank, self._world_size = rank, world_size

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        empty = _array(torch.empty(shape, dtype=dtype))
        return self._nrtpy.NrtpyTensor.from_numpy(empty, name=name, core_id=0)

    def write(self, handle: Any, tensor: Tensor) -> None:
        handle.write_from_numpy(_array(tensor))

    def read(self, handle: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # The array's own type may be void, as the runtime does not always know it.
        data = np.array(handle.numpy()).reshape(-1).view(np.uint8)
        return torch.from_numpy(data).view(dtype).view(shape)

    def load(self, neff: Path, io: GraphIO, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], Any]:
        model = self._nrtpy.NrtpyModel.load_from_neff(
            neff,
            name=neff.stem,
            core_id=0,
            cc_enabled=self._world_size > 1,
            rank_id=self._rank,
            world_size=self._world_size,
        )
        names = _names(neff, "input", io.inputs, model.input_tensors_info)
        results = _names(neff, "output", io.outputs, model.output_tensors_info)
        return partial(
            model,
            inputs=dict(zip(names, inputs, strict=True)),
            outputs=dict(zip(results, outputs, strict=True)),
        )


def _array(tensor: Tensor) -> np.ndarray:
    """A view of a CPU tensor, or a copy where it is not contiguous."""
    return tensor.contiguous().view(_CARRIERS.get(tensor.dtype, tensor.dtype)).numpy()


def _names(
    neff: Path, kind: str, bindings: Sequence[InputBinding | OutputBinding], found: Mapping[str, Any]
) -> list[str]:
    """What the compiled graph calls its tensors, in the order of our description."""
    names = []
    for index, binding in enumerate(bindings):
        candidates = (f"{kind}{index}", binding.name, f"{kind}{index}{_ALIASED}", binding.name + _ALIASED)
        name = next((each for each in candidates if each in found), None)
        if name is None:
            raise RuntimeError(
                f"{neff} has no {kind} {index} ({binding.name}) but {', '.join(list(found)[:8])}; export the model again"
            )
        if found[name].size != byte_size(binding):
            raise RuntimeError(
                f"{kind} {name} of {neff} has {found[name].size:,} bytes, and {binding.name} has {byte_size(binding):,}; "
                f"export the model again"
            )
        names.append(name)
    return names
