# SPDX-License-Identifier: Apache-2.0
"""A quantized weight: codes of 4 or 8 bits, with a scale for each group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ....config import ACTIVATIONS


# Values of e2m1 by their code: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf, table 5.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = (*_E2M1, *(-value for value in _E2M1))
# What the codes of a weight are, and the type that holds them. Two codes of 4 bits share a byte, the first one in its low half.
CODE_DTYPES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn, "fp4": torch.uint8}
PACKED = ("int4", "fp4")
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Kinds of codes that activations may be rounded for.
MEET_CODED = ("int8", "int4")
# Without a shift, codes of int4 stand for -8 to 7.
INT4_MIDDLE = 8
# Numbers of one part of a weight, and a number of outputs that leaves no part of a tile to a matrix product.
_PART, _OUTPUTS = 1 << 19, 64
# Bits of float16 that are 0 in a scale of 5 significant bits, a short one. A code of int4 has 3 where it is no power of two, so that such a
# scale times a code has no more than the 8 of bfloat16.
UNUSED_SCALE_BITS = 63


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight `[..., outputs, inputs]`: value = code * scale + shift, in float32, the group's scale and shift.

    Attributes:
        kind: "int8", "int4", "fp8" (e4m3) or "fp4" (e2m1).
        codes: `[..., outputs, inputs]`, or of 4 bits `[..., outputs, inputs / 2]`; of the type in `CODE_DTYPES`. A code of int4 is
            0 to 15, and stands for itself less 8 where there is no shift.
        scale: `[..., outputs, groups]` in one of `SCALE_DTYPES`.
        shift: float32 as `scale`, where values are not symmetric: less a zero point times the scale, or GGUF's minimum; for int4 and
            int8 alone.
        activations: one of `ACTIVATIONS`, what inputs are rounded to, for int4 and int8 alone.

    Raises:
        ValueError: types or shapes do not agree, or activations are rounded to what does not meet such codes.
    """

    kind: str
    codes: Tensor
    scale: Tensor
    shift: Tensor | None = None
    activations: str | None = None

    def __post_init__(self) -> None:
        if self.codes.dtype != CODE_DTYPES[self.kind] or self.scale.dtype not in SCALE_DTYPES:
            raise ValueError(
                f"codes of {self.kind} are {self.codes.dtype} and scales {self.scale.dtype}; they are to be "
                f"{CODE_DTYPES[self.kind]}, and one of {', '.join(map(str, SCALE_DTYPES))}"
            )
        groups = self.scale.shape[-1] if self.scale.dim() == self.codes.dim() else 0
        if not groups or self.scale.shape[:-1] != self.codes.shape[:-1] or self.inputs % groups:
            raise ValueError(
                f"scales {list(self.scale.shape)} do not fit codes {list(self.codes.shape)} of {self.kind}: they have one for each "
                f"group of an output's {self.inputs} inputs"
            )
        if self.shift is not None:
            whole = self.kind in ("int8", "int4")
            if not whole or self.shift.dtype != torch.float32 or self.shift.shape != self.scale.shape:
                raise ValueError(
                    f"a shift {list(self.shift.shape)} of {self.shift.dtype} does not fit {self.kind} with scales "
                    f"{list(self.scale.shape)}: whole numbers have one in float32 for each scale"
                )

        if self.activations is not None and (self.activations not in ACTIVATIONS or self.kind not in MEET_CODED):
            raise ValueError(
                f"activations of {self.activations} do not meet codes of {self.kind}: those of {', '.join(ACTIVATIONS)} meet "
                f"{' and '.join(MEET_CODED)}"
            )

    @property
    def outputs(self) -> int:
        return self.codes.shape[-2]

    @property
    def inputs(self) -> int:
        return self.codes.shape[-1] * (2 if self.kind in PACKED else 1)

    @property
    def group_size(self) -> int:
        return self.inputs // self.scale.shape[-1]

    def parts(self) -> Iterator[tuple[tuple[Any, ...], QuantizedWeight]]:
        """Yield some outputs after others, with their place. A part that is dequantized stays in a core's caches; a head is gigabytes."""
        count = max(1, _PART // self.inputs // _OUTPUTS) * _OUTPUTS
        for outer in product(*map(range, self.codes.shape[:-2])):
            for start in range(0, self.outputs, count):
                place = (*outer, slice(start, start + count))
                yield place, self.select_part(place)

    def select_part(self, index: int | tuple[Any, ...]) -> QuantizedWeight:
        """Return one of several weights, such as an expert's, or some outputs."""
        shift = None if self.shift is None else self.shift[index]
        return QuantizedWeight(self.kind, self.codes[index], self.scale[index], shift, self.activations)

    def values(self) -> Tensor:
        """Return codes as numbers `[..., outputs, inputs]` float32, not yet scaled."""
        if self.kind not in PACKED:
            return self.codes.float()
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(-2)
        if self.kind == "fp4":
            return torch.tensor(FP4_VALUES, device=codes.device)[codes.int()]
        return codes.float() if self.shift is not None else codes.float().sub_(INT4_MIDDLE)

    def dequantize(self) -> Tensor:
        """Return `[..., outputs, inputs]` float32. Exact but for one rounding where a shift is added."""
        grouped = self.values().unflatten(-1, (-1, self.group_size))
        grouped.mul_(self.scale.float()[..., None])  # in place: of a head of many tokens a second copy is gigabytes
        return (grouped if self.shift is None else grouped.add_(self.shift[..., None])).flatten(-2)


def pack_int4(codes: Tensor) -> Tensor:
    """Pack codes 0 to 15 `[..., inputs]`, whole numbers of any type, two to a byte: `[..., inputs / 2]` uint8."""
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


BLOCK = 64
LARGEST_CODE = 127
# Below it no scale has an inverse that is a normal number: the block counts as zeros.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def round_block(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes of int8 `[..., n]`, in float32, and the scales `[..., 1]` of blocks `[..., n]`; not finite: zeros, with the scale NaN."""
    largest = x.abs().amax(-1, keepdim=True)
    scale = largest / LARGEST_CODE
    usable = (scale >= SMALLEST_SCALE) & scale.isfinite()
    inverse = torch.where(usable, torch.ones_like(scale) / torch.where(usable, scale, 1.0), 0.0)
    codes = torch.where(usable, torch.round(torch.where(usable, x, 0.0) * inverse), 0.0)
    scale = torch.where(usable, scale, torch.where(largest.isfinite(), 0.0, torch.nan))
    return codes, scale


def integer_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Return `[..., outputs]` float32 of x `[..., inputs]` and a weight `[outputs, inputs]` of int8 or int4."""
    rows = x.reshape(-1, weight.inputs).float()
    values, size = weight.values(), weight.group_size
    total = rows.new_zeros((len(rows), weight.outputs))
    for group, first in enumerate(range(0, weight.inputs, size)):
        product, ones = torch.zeros_like(total), rows.new_zeros((len(rows), 1))
        for begin in range(first, first + size, BLOCK):
            end = min(begin + BLOCK, first + size)
            codes, scale = round_block(rows[:, begin:end])
            # Whole numbers below 2^24, in whatever order they are added.
            product = _multiply_add(torch.matmul(codes, values[:, begin:end].t()), scale, product)
            ones = _multiply_add(codes.sum(-1, keepdim=True), scale, ones)
        total = _multiply_add(product, weight.scale[:, group].float(), total)
        if weight.shift is not None:
            total = _multiply_add(ones, weight.shift[:, group], total)
    return total.reshape(*x.shape[:-1], weight.outputs)


def _multiply_add(left: Tensor, right: Tensor, added: Tensor) -> Tensor:
    """Multiply and add float32 tensors. The product is exact in float64, so the sum is rounded nearly as a fused operation does it."""
    return (left.double() * right.double() + added.double()).float()
