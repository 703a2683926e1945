# SPDX-License-Identifier: Apache-2.0
"""Where the values of a graph are while it becomes a plan: in memory, with a layout, or known already; or pending (fusion.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .program import BufferKind, Operand


@dataclass(eq=False)
class Memory:
    """A buffer that the plan will have.

    Attributes:
        index: its number in the plan.
    """

    index: int
    kind: BufferKind
    name: str
    bytes: int


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in memory; `layout` is a meta tensor with its shape, strides and offset."""

    memory: Memory
    layout: Tensor


@dataclass(frozen=True, eq=False)
class Known:
    """A tensor that depends on nothing that is known later."""

    tensor: Tensor


def contiguous(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A layout of its own memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def operand(memory: Memory, layout: Tensor) -> Operand:
    return Operand(
        memory.index,
        dtype_name(layout.dtype),
        int(layout.storage_offset()),
        tuple(layout.shape),
        tuple(layout.stride()),
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
