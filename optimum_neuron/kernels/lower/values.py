# SPDX-License-Identifier: Apache-2.0
"""Values of a graph that becomes a plan: in memory, with a layout, or known. Others are pending (fusion.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..run.memory import dtype_name
from ..steps.steps import BufferKind, Operand


@dataclass(eq=False)
class PlannedBuffer:
    """A buffer that the plan will have.

    Attributes:
        index: its number in the plan.
    """

    index: int
    kind: BufferKind
    name: str
    bytes: int


@dataclass(frozen=True, eq=False)
class StoredValue:
    """A tensor in memory; `layout` is a meta tensor with its shape, strides and offset."""

    memory: PlannedBuffer
    layout: Tensor


@dataclass(frozen=True, eq=False)
class KnownValue:
    """A tensor that is known before any step runs."""

    tensor: Tensor


def contiguous(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the layout of a contiguous tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


def operand(memory: PlannedBuffer, layout: Tensor) -> Operand:
    return Operand(
        memory.index,
        dtype_name(layout.dtype),
        int(layout.storage_offset()),
        tuple(layout.shape),
        tuple(layout.stride()),
    )
