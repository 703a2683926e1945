# SPDX-License-Identifier: Apache-2.0
"""Where the buffers of a plan are."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ...artifact.weights import check_bytes
from ...step.spec import GraphSpec, TensorSpec
from ..plan.access import PlanError, check_operand
from ..plan.program import Buffer, Operand, Plan


_ALIGNMENT = 64  # a cache line


class PlanMemory:
    """The memory of one graph's buffers: weights and states where they are, the rest beside them.

    Attributes:
        addresses: of an array with the address of every buffer.
        outputs: what the graph returns, in the order of its spec: in each run the same memory, which other graphs use, too.
    """

    def __init__(
        self, plan: Plan, spec: GraphSpec, vocab_size: int, tensors: Mapping[str, Tensor], arena: Tensor
    ) -> None:
        """Finds every buffer.

        Raises:
            PlanError: one is larger than what it stands for.
        """
        self._buffers = plan.buffers
        self._specs = {"input": spec.inputs(), "output": spec.outputs(vocab_size)}
        self._memory: dict[int, Tensor] = {}
        self._inputs: list[_Input] = []
        outputs: dict[int, Tensor] = {}
        place = arena.numel() - _output_bytes(plan)
        self._array = (ctypes.c_void_p * max(len(plan.buffers), 1))()
        self.addresses = ctypes.addressof(self._array)
        check_bytes(sum(buffer.bytes for buffer in plan.buffers if buffer.kind == "kept"))
        for index, buffer in enumerate(plan.buffers):
            self._check(buffer, tensors, arena)
            if buffer.kind == "output":
                memory = arena[place : place + buffer.bytes]
                place += _aligned(buffer.bytes)
                own = self._specs["output"][int(buffer.name)]
                outputs[int(buffer.name)] = memory.view(_dtype(own)).view(own.shape)
            else:
                memory = self._memory[index] = self._find(buffer, tensors, arena)
            self._array[index] = memory.data_ptr()
            if buffer.kind == "input":
                own = self._specs["input"][int(buffer.name)]
                self._inputs.append(_Input(int(buffer.name), memory.view(_dtype(own)).view(own.shape)))
        self.outputs = tuple(outputs[number] for number in sorted(outputs))

    def _check(self, buffer: Buffer, tensors: Mapping[str, Tensor], arena: Tensor) -> None:
        if buffer.kind in ("input", "output"):
            specs = {str(number): each for number, each in enumerate(self._specs[buffer.kind])}
            has = _bytes(specs[buffer.name]) if buffer.name in specs else -1
            fits = buffer.bytes == has
        elif buffer.kind in ("tensor", "constant"):
            has = tensors[buffer.name].nbytes if buffer.name in tensors else -1
            fits = buffer.bytes <= has
        else:
            has = arena.numel() if buffer.kind == "arena" else buffer.bytes
            fits = 0 <= buffer.offset <= buffer.offset + buffer.bytes <= has and buffer.offset % _ALIGNMENT == 0
        if not fits or buffer.bytes < 0:
            raise PlanError(f"it takes {buffer.bytes} bytes of {buffer.kind} {buffer.name!r}, which has {has}")

    def _find(self, buffer: Buffer, tensors: Mapping[str, Tensor], arena: Tensor) -> Tensor:
        if buffer.kind in ("tensor", "constant"):
            tensor = tensors[buffer.name]
            return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else arena[:0]
        if buffer.kind == "arena":
            return arena[buffer.offset : buffer.offset + buffer.bytes]
        return torch.empty(buffer.bytes, dtype=torch.uint8)

    def tensor(self, operand: Operand) -> Tensor:
        """An operand, as torch takes it.

        Raises:
            PlanError: it leaves its buffer, or is an output of the graph, which kernels alone write.
        """
        check_operand(operand, self._buffers)
        memory = self._memory.get(operand.buffer)
        if memory is None:
            raise PlanError("a call of torch uses an output of the graph")
        dtype = getattr(torch, operand.dtype)
        whole = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(operand.shape, operand.strides, whole.storage_offset() + operand.offset)

    def start(self, inputs: Sequence[Tensor]) -> None:
        """Takes in the inputs of a run."""
        for each in self._inputs:
            each.take(inputs[each.number])


class _Input:
    """The memory of an input of the graph.

    A runner gives the same tensors in every step: what is to be asked of one is asked once, and its bytes are copied without torch, of
    which each operator takes some 50 us to begin behind a step that has read all weights.
    """

    def __init__(self, number: int, memory: Tensor) -> None:
        self.number = number
        self._memory = memory
        self._place, self._bytes = memory.data_ptr(), memory.nbytes
        self._source: Tensor | None = None
        self._from = 0

    def take(self, tensor: Tensor) -> None:
        if tensor is not self._source:
            alike = tensor.shape == self._memory.shape and tensor.dtype == self._memory.dtype
            if not alike or not tensor.is_contiguous():
                self._memory.copy_(tensor)
                return
            self._source, self._from = tensor, tensor.data_ptr()
        ctypes.memmove(self._place, self._from, self._bytes)


def allocate_arena(plans: Iterable[Plan]) -> Tensor:
    """Bytes for what lives within a step, and for its outputs at their end, for plans that run one at a time.

    Raises:
        ValueError: this machine has less memory.
    """
    sizes = [(_aligned(plan.arena), _output_bytes(plan)) for plan in plans]
    size = max((arena for arena, _ in sizes), default=0) + max((outputs for _, outputs in sizes), default=0)
    check_bytes(size)
    memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + size]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _output_bytes(plan: Plan) -> int:
    return sum(_aligned(buffer.bytes) for buffer in plan.buffers if buffer.kind == "output")


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def _bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _dtype(spec).itemsize
