# SPDX-License-Identifier: Apache-2.0
"""A weight as a format stores it, unpacked: as a `QuantizedWeight` where that is the same to the bit, and as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...step.features.codes.weight import INT4_MIDDLE, QuantizedWeight, pack_int4


DOWNLOAD = "download or copy the checkpoint again"
PLAIN_REMEDY = "pass --dequantize to export its weights as plain numbers"
# The largest whole number, or value of a code, that a scale is multiplied by.
_MOST = {"int4": 15, "int8": 255, "fp8": 448, "fp4": 6}
# Groups are no smaller in the formats that are read; below that, scales would take more room than codes.
_SMALLEST_GROUP = 16


class NotKeptError(ValueError):
    """A weight that no `QuantizedWeight` stands for to the bit; it can be dequantized."""


@dataclass(frozen=True)
class FormatWeight:
    """A weight `[..., outputs, inputs]`: value = (code - zero) * scale in float32, by the group of an input.

    Codes are int4 as uint8 0 to 15, int8, fp8 as float8_e4m3fn, or fp4 packed as in `QuantizedWeight`. Scales and zero points, int16, are
    `[..., outputs, groups]`; without these, codes count from 8 (int4) or 0. `group` is `[inputs]` int64; None for equal parts next to each other.
    Raise ValueError for a scale that leaves no finite values, and codes that are no numbers.
    """

    name: str
    kind: str
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    group: Tensor | None = None

    def __post_init__(self) -> None:
        largest = self.scale.float().abs().amax().item()
        if not math.isfinite(largest) or largest * _MOST[self.kind] > torch.finfo(torch.float32).max:
            raise ValueError(f"{self.name} has a scale of {largest}, which leaves no finite values; {DOWNLOAD}")
        if self.kind == "fp8" and bool((self.codes.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise ValueError(f"{self.name} holds NaN; {DOWNLOAD}")

    def quantized(self) -> QuantizedWeight:
        """Return the same weight to the bit; raise NotKeptError where there is none."""
        scale, zero = self._side_by_side()
        codes, shift = self.codes, None
        if zero is not None:
            # code * scale - zero * scale is (code - zero) * scale to the bit where all products have room in float32.
            spare = (1 << (4 if self.kind == "int4" else 8)) - 1
            if scale.dtype == torch.float32 and bool((scale.contiguous().view(torch.int32) & spare).any()):
                raise NotKeptError(
                    f"{self.name} has zero points and scales of float32, with which no codes hold its values to the bit; {PLAIN_REMEDY}"
                )
            shift = -(zero.float() * scale.float())
        if self.kind == "int4":
            if codes.shape[-1] % 2:
                raise NotKeptError(
                    f"{self.name} has {codes.shape[-1]} inputs, and codes of 4 bits are kept in pairs; {PLAIN_REMEDY}"
                )
            codes = pack_int4(codes)
        return QuantizedWeight(self.kind, codes, scale.contiguous(), shift)

    def dequantize(self) -> Tensor:
        """Return `[..., outputs, inputs]` float32, by the definition of the format."""
        if self.kind == "fp4":
            values = QuantizedWeight("fp4", self.codes, torch.ones(*self.codes.shape[:-1], 1)).values()
        else:
            values = self.codes.float() - self._middle
        group = self.group
        if group is None:
            group = torch.arange(values.shape[-1]) // (values.shape[-1] // self.scale.shape[-1])
        if self.zero is not None:
            values = values - (self.zero[..., group] - self._middle).float()
        return values * self.scale[..., group].float()

    @property
    def _middle(self) -> int:
        return INT4_MIDDLE if self.kind == "int4" else 0

    def _side_by_side(self) -> tuple[Tensor, Tensor | None]:
        """Return scales and zero points of groups that are equal parts of the inputs; no zero points where they change nothing."""
        scale, zero = self.scale, self.zero
        if zero is not None and bool((zero == self._middle).all()):
            zero = None
        if self.group is None:
            return scale, zero
        changes = (torch.nonzero(self.group[1:] != self.group[:-1]).flatten() + 1).tolist()
        size = math.gcd(len(self.group), *changes)
        if size < min(_SMALLEST_GROUP, len(self.group)):
            raise NotKeptError(
                f"{self.name} has inputs of one group that do not stand side by side (parts of {size} inputs; at least "
                f"{_SMALLEST_GROUP} can be kept); {PLAIN_REMEDY}"
            )
        places = self.group[::size]
        return scale[..., places], None if zero is None else zero[..., places]


def check_group(name: str, group: Tensor, groups: int) -> Tensor:
    """Return numbers of groups `[inputs]` as int64; raise ValueError for one outside of 0 to `groups` - 1."""
    low, high = int(group.amin()), int(group.amax())
    if low < 0 or high >= groups:
        raise ValueError(f"{name} names groups {low} to {high}, and there are scales of 0 to {groups - 1}; {DOWNLOAD}")
    return group.long()


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return numbers `[..., 32 / bits * words]` uint8 of int32 words `[..., words]`; the first number has the lowest bits."""
    # Little-endian: as safetensors stores them, and the machines that this runs on.
    pieces = words.contiguous().view(torch.uint8)
    return pieces if bits == 8 else torch.stack((pieces & 15, pieces >> 4), -1).flatten(-2)
