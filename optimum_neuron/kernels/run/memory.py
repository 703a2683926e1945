# SPDX-License-Identifier: Apache-2.0
"""The memory of a plan's buffers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..host.machine import machine_memory
from ..steps.access import ALIGNMENT, PlanError, check_operand
from ..steps.steps import Buffer, Operand, PlanData


class TensorForm(Protocol):
    """The shape and type of an input or output of a graph; the type as torch names it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


class PlanMemory:
    """The memory of one plan's buffers: weights and states where they are, and new memory for the rest.

    Attributes:
        addresses: of an array with the address of each buffer.
        outputs: what the graph returns, in order: in each run the same memory, which other plans use, too.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        inputs: Sequence[TensorForm],
        outputs: Sequence[TensorForm],
        tensors: Mapping[str, Tensor],
        arena: Tensor,
    ) -> None:
        """Find each buffer.

        Raises:
            PlanError: a buffer is larger than what it stands for.
            ValueError: the machine has less memory.
        """
        self._buffers = buffers
        self._forms = {"input": inputs, "output": outputs}
        self._memory: dict[int, Tensor] = {}
        self._inputs: list[_Input] = []
        found: dict[int, Tensor] = {}
        place = arena.numel() - _count_output_bytes(buffers)
        self._array = (ctypes.c_void_p * max(len(buffers), 1))()
        self.addresses = ctypes.addressof(self._array)
        check_bytes(sum(buffer.bytes for buffer in buffers if buffer.kind == "kept"))
        for index, buffer in enumerate(buffers):
            self._check_size(buffer, tensors, arena)
            if buffer.kind == "output":
                memory = arena[place : place + buffer.bytes]
                place += _align(buffer.bytes)
                found[int(buffer.name)] = _view_as(memory, outputs[int(buffer.name)])
            else:
                memory = self._memory[index] = _find_memory(buffer, tensors, arena)
            self._array[index] = memory.data_ptr()
            if buffer.kind == "input":
                number = int(buffer.name)
                self._inputs.append(_Input(number, _view_as(memory, inputs[number])))
        self.outputs = tuple(found[number] for number in sorted(found))

    def _check_size(self, buffer: Buffer, tensors: Mapping[str, Tensor], arena: Tensor) -> None:
        if buffer.kind in ("input", "output"):
            forms = {str(number): each for number, each in enumerate(self._forms[buffer.kind])}
            has = (
                math.prod(forms[buffer.name].shape) * _dtype(forms[buffer.name]).itemsize
                if buffer.name in forms
                else -1
            )
            fits = buffer.bytes == has
        elif buffer.kind in ("tensor", "constant"):
            has = tensors[buffer.name].nbytes if buffer.name in tensors else -1
            fits = buffer.bytes <= has
        else:
            has = arena.numel() if buffer.kind == "arena" else buffer.bytes
            fits = 0 <= buffer.offset <= buffer.offset + buffer.bytes <= has and buffer.offset % ALIGNMENT == 0
        if not fits or buffer.bytes < 0:
            raise PlanError(f"it takes {buffer.bytes} bytes of {buffer.kind} {buffer.name!r}, which has {has}")

    def view_operand(self, operand: Operand) -> Tensor:
        """Return an operand as a tensor.

        Raises:
            PlanError: the operand leaves its buffer, or is an output of the graph, which kernels alone write.
        """
        check_operand(operand, self._buffers)
        memory = self._memory.get(operand.buffer)
        if memory is None:
            raise PlanError("a call of torch uses an output of the graph")
        dtype = getattr(torch, operand.dtype)
        whole = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(operand.shape, operand.strides, whole.storage_offset() + operand.offset)

    def take_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Copy the inputs of a run."""
        for each in self._inputs:
            each.copy_from(inputs[each.number])


class _Input:
    """The memory of an input of the graph.

    A runner gives the same tensors in every step. So each is checked once, and its bytes are copied without torch, of which an
    operator takes some 50 us to begin after a step that has read all weights.
    """

    def __init__(self, number: int, memory: Tensor) -> None:
        self.number = number
        self._memory = memory
        self._place, self._bytes = memory.data_ptr(), memory.nbytes
        self._source: Tensor | None = None
        self._from = 0

    def copy_from(self, tensor: Tensor) -> None:
        if tensor is not self._source:
            alike = tensor.shape == self._memory.shape and tensor.dtype == self._memory.dtype
            if not alike or not tensor.is_contiguous():
                self._memory.copy_(tensor)
                return
            self._source, self._from = tensor, tensor.data_ptr()
        ctypes.memmove(self._place, self._from, self._bytes)


def _find_memory(buffer: Buffer, tensors: Mapping[str, Tensor], arena: Tensor) -> Tensor:
    if buffer.kind in ("tensor", "constant"):
        tensor = tensors[buffer.name]
        return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else arena[:0]
    if buffer.kind == "arena":
        return arena[buffer.offset : buffer.offset + buffer.bytes]
    return torch.empty(buffer.bytes, dtype=torch.uint8)


def allocate_arena(plans: Iterable[PlanData]) -> Tensor:
    """Return bytes for what lives within a step, and at their end for its outputs, for plans that run one at a time.

    Raises:
        ValueError: the machine has less memory.
    """
    sizes = [(_align(plan.arena), _count_output_bytes(plan.buffers)) for plan in plans]
    size = max((arena for arena, _ in sizes), default=0) + max((outputs for _, outputs in sizes), default=0)
    check_bytes(size)
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT
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


def _view_as(memory: Tensor, form: TensorForm) -> Tensor:
    return memory.view(_dtype(form)).view(form.shape)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(form: TensorForm) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, form.dtype)
    return dtype
