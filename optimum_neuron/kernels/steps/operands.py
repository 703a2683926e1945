# SPDX-License-Identifier: Apache-2.0
"""What steps are made of, as plain data: buffers, operands in them, tokens, and linear layers. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


BufferKind = Literal["input", "output", "tensor", "constant", "kept", "arena"]
# How the names of states begin: of an artifact's tensors, steps write to these alone.
STATES = "kv_cache."


@dataclass(frozen=True)
class Buffer:
    """A piece of memory, at `offset` in the arena where it lives there.

    A "tensor" is a weight or state of the artifact. What is "kept" is computed once, when the plan is bound. What lives within a step is
    in the "arena". The name of an input or output is its number.
    """

    kind: BufferKind
    name: str
    bytes: int
    offset: int = 0


@dataclass(frozen=True)
class Operand:
    """A tensor in a buffer; `offset` and `strides` in elements."""

    buffer: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Tokens:
    """Tokens of the graph, in order, that a step computes one by one: the step may end at the last live one."""

    first: int
    count: int


@dataclass(frozen=True)
class Codes:
    """Scales and shifts of a quantized weight of a kind of step/features/codes/weight.py: a code stands for code * scale + shift.

    `scale [..., outputs, groups]` is float32, float16 or bfloat16, `shift` the same in float32. Without one, codes of int4 stand for
    themselves less 8. With `activations="int8"` rows of x are rounded to it before (step/features/codes/activations.py).
    """

    kind: str
    scale: Operand
    shift: Operand | None
    activations: str | None = None

    @property
    def can_be_short(self) -> bool:
        """Return whether kernels may take such codes times their scales as numbers of bfloat16."""
        unrounded = self.shift is None and self.activations is None
        return self.kind == "int4" and unrounded and self.scale.dtype == "float16"


@dataclass(frozen=True)
class Layer:
    """A linear layer: `output [rows, outputs] = x @ weight.T + bias`. Layers of a step have `codes` of one kind and group, or none."""

    weight: Operand
    bias: Operand | None
    output: Operand
    codes: Codes | None = None
