# SPDX-License-Identifier: Apache-2.0
"""Fake of nrtpy, as far as ranks use it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fake_neuron.core import Memory, Program, size_of


class NrtError(RuntimeError):
    """Raised for a status of libnrt."""


@dataclass(frozen=True)
class TensorMetadata:
    shape: tuple[int, ...]
    size: int


class NrtpyTensor:
    def __init__(self, tensor_ref, shape, dtype, name=None) -> None:
        self._memory: Memory = tensor_ref
        self.shape, self.dtype, self.name = shape, dtype, name

    @classmethod
    def from_numpy(cls, array, name=None, core_id=0) -> NrtpyTensor:
        array = np.ascontiguousarray(array)
        memory = Memory(array.nbytes, core_id)
        memory.write(array)
        return cls(memory, array.shape, array.dtype, name)

    def write_from_numpy(self, array) -> None:
        array = np.ascontiguousarray(array)
        if array.nbytes != self._memory.data.nbytes:
            raise ValueError(f"{array.nbytes} bytes written to a tensor of {self._memory.data.nbytes}")
        self._memory.write(array)

    def numpy(self):
        # The runtime knows bytes, and not always a type.
        void = self.dtype == np.int16
        return self._memory.read().view(f"|V{self.dtype.itemsize}" if void else self.dtype).reshape(self.shape)


class NrtpyModel:
    def __init__(self, program: Program) -> None:
        self._program = program
        self.input_tensors_info = {each.neff_name: _metadata(each) for each in program.module.inputs}
        self.output_tensors_info = {each.neff_name: _metadata(each) for each in program.module.outputs}

    @classmethod
    def load_from_neff(cls, neff_path, name=None, core_id=0, cc_enabled=False, rank_id=0, world_size=1) -> NrtpyModel:
        if cc_enabled != (world_size > 1):
            raise NrtError("NRT Error NRT_INVALID(2): collectives are for several ranks")
        try:
            data = Path(neff_path).read_bytes()
            return cls(Program(data, name or Path(neff_path).stem, core_id, rank_id, world_size))
        except OSError as error:
            raise NrtError(f"NRT Error NRT_FAILURE(1): Failed to load model ({error})") from None
        except RuntimeError as error:
            raise NrtError(str(error)) from None

    def __call__(self, inputs, outputs=None, save_trace=False, ntff_name=None):
        if outputs is None:
            raise NotImplementedError("our runtime binds all outputs")
        given, results = (
            self._order(inputs, self._program.module.inputs),
            self._order(outputs, self._program.module.outputs),
        )
        try:
            self._program.execute(given, results)
        except RuntimeError as error:
            raise NrtError(str(error)) from None

    def _order(self, tensors, expected) -> list[Memory]:
        names = [each.neff_name for each in expected]
        if set(tensors) != set(names):
            raise NrtError(f"NRT Error NRT_INVALID(2): tensors {sorted(tensors)} for {sorted(names)}")
        return [tensors[name]._memory for name in names]


def _metadata(tensor) -> TensorMetadata:
    return TensorMetadata(tensor.shape, size_of(tensor))
