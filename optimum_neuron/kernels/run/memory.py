# SPDX-License-Identifier: Apache-2.0
"""The memory of a plan's buffers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import ml_dtypes as ml_dtypes  # from here on numpy knows bfloat16 and float8_e4m3fn by name
import numpy as np

from ..host.machine import machine_memory
from ..steps.access import ALIGNMENT, PlanError
from ..steps.operands import Buffer
from ..steps.steps import PlanData


class TensorForm(Protocol):
    """The shape and type of a tensor: of numpy, of torch, or one that is only described, with the type's name."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> object: ...


class PlanMemory:
    """The memory of one plan's buffers: weights and states where they are, and new memory for the rest.

    `addresses` is that of an array with the address of each buffer. `outputs` are in the same memory in each run, which other plans use, too.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        inputs: Sequence[TensorForm],
        outputs: Sequence[TensorForm],
        tensors: Mapping[str, np.ndarray],
        arena: np.ndarray,
    ) -> None:
        """Find each buffer.

        Raises:
            PlanError: a buffer is larger than what it stands for.
            ValueError: the machine has less memory.
        """
        self._buffers = buffers
        self._forms = {"input": inputs, "output": outputs}
        self._memory: dict[int, np.ndarray] = {}
        views: dict[str, dict[int, np.ndarray]] = {"input": {}, "output": {}}
        place = len(arena) - _count_output_bytes(buffers)
        self._array = (ctypes.c_void_p * max(len(buffers), 1))()
        self.addresses = ctypes.addressof(self._array)
        check_bytes(sum(buffer.bytes for buffer in buffers if buffer.kind == "kept"))
        for index, buffer in enumerate(buffers):
            self._check_size(buffer, tensors, arena)
            if buffer.kind == "output":
                memory = arena[place : place + buffer.bytes]
                place += _align(buffer.bytes)
            else:
                memory = self._memory[index] = _find_memory(buffer, tensors, arena)
            self._array[index] = memory.ctypes.data
            if buffer.kind in views:
                number = int(buffer.name)
                form = self._forms[buffer.kind][number]
                views[buffer.kind][number] = memory.view(dtype_name(form.dtype)).reshape(form.shape)
        self._inputs = tuple(views["input"].items())
        self.outputs = tuple(view for _, view in sorted(views["output"].items()))

    def _check_size(self, buffer: Buffer, tensors: Mapping[str, np.ndarray], arena: np.ndarray) -> None:
        if buffer.kind in ("input", "output"):
            forms = {str(number): each for number, each in enumerate(self._forms[buffer.kind])}
            form = forms.get(buffer.name)
            has = -1 if form is None else math.prod(form.shape) * np.dtype(dtype_name(form.dtype)).itemsize
            fits = buffer.bytes == has
        elif buffer.kind in ("tensor", "constant"):
            has = tensors[buffer.name].nbytes if buffer.name in tensors else -1
            fits = buffer.bytes <= has
        else:
            has = len(arena) if buffer.kind == "arena" else buffer.bytes
            fits = 0 <= buffer.offset <= buffer.offset + buffer.bytes <= has and buffer.offset % ALIGNMENT == 0
        if not fits or buffer.bytes < 0:
            raise PlanError(f"it takes {buffer.bytes} bytes of {buffer.kind} {buffer.name!r}, which has {has}")

    def take_inputs(self, inputs: Sequence[np.ndarray]) -> None:
        """Copy the inputs of a run."""
        for number, memory in self._inputs:
            np.copyto(memory, inputs[number])


def _find_memory(buffer: Buffer, tensors: Mapping[str, np.ndarray], arena: np.ndarray) -> np.ndarray:
    if buffer.kind in ("tensor", "constant"):
        tensor = tensors[buffer.name]
        return tensor.reshape(-1).view(np.uint8) if tensor.size else arena[:0]
    if buffer.kind == "arena":
        return arena[buffer.offset : buffer.offset + buffer.bytes]
    return np.empty(buffer.bytes, np.uint8)


def allocate_arena(plans: Iterable[PlanData]) -> np.ndarray:
    """Return bytes for what lives within a step, and at their end for its outputs, for plans that run one at a time.

    Raises:
        ValueError: the machine has less memory.
    """
    sizes = [(0, 0), *((_align(plan.arena), _count_output_bytes(plan.buffers)) for plan in plans)]
    size = sum(map(max, zip(*sizes, strict=True)))
    check_bytes(size)
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def check_bytes(needed: int) -> None:
    """Raise ValueError where graphs work in more memory than this machine has."""
    memory = machine_memory()
    if not 0 <= needed <= memory:
        raise ValueError(
            f"a graph takes {needed / 1e9:,.1f} GB, and this machine has {memory / 1e9:,.1f} GB of memory"
        )


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _count_output_bytes(buffers: Sequence[Buffer]) -> int:
    return sum(_align(buffer.bytes) for buffer in buffers if buffer.kind == "output")


def dtype_name(dtype: object) -> str:
    """Return the name of a type of numpy or torch."""
    return str(dtype).removeprefix("torch.")
