# SPDX-License-Identifier: Apache-2.0
"""The layout of weights in an artifact's files: dimensions in the order in which graphs take them, and joined tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....step.features.codes.weight import pack_int4


@dataclass(frozen=True)
class FileWeight:
    """A tensor of a file of weights, made of tensors of the model.

    Attributes:
        parts: names of the model's tensors, joined along the last dimension.
        order: of each part's dimensions, as `Tensor.permute` takes it.
        blocks: of codes of 4 bits `[..., outputs, inputs / 2]`: a byte holds one input of a block's first half and one of its second; 0: other weights.
    """

    parts: tuple[str, ...]
    order: tuple[int, ...]
    blocks: int = 0

    @property
    def name(self) -> str:
        """Return its name in graphs and files: `a.q.weight` and `a.k.weight` are `a.q-k.weight.order_1_0`; no model has such names."""
        split = [part.split(".") for part in self.parts]
        head = _find_common(split)
        tail = _find_common([part[: len(head) - 1 if head else None : -1] for part in split])[::-1]
        middles = [".".join(part[len(head) : len(part) - len(tail)]) for part in split]
        joined = [*head, *filter(None, ["-".join(middles)]), *tail]
        halves = ["halves", str(self.blocks)] if self.blocks else []
        return ".".join([*joined, "_".join(["order", *map(str, self.order), *halves])])

    def shape(self, part: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
        """Return the shape, from those of the parts by name."""
        shapes = [[part(name)[dim] for dim in self.order] for name in self.parts]
        return (*shapes[0][:-1], sum(shape[-1] for shape in shapes))

    def tensor(self, part: Callable[[str], Tensor]) -> Tensor:
        """Return the tensor, from the parts by name; a view of a single part."""
        parts = (part(name) for name in self.parts)
        tensors = [(_in_halves(each, self.blocks) if self.blocks else each).permute(self.order) for each in parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)


@dataclass(frozen=True)
class WeightLayout:
    """The weights that are stored otherwise than the model has them.

    Attributes:
        stored: in the order of their use.
        replaced: names of the model's tensors that graphs take in no other form.
    """

    stored: tuple[FileWeight, ...] = ()
    replaced: frozenset[str] = frozenset()


def _in_halves(codes: Tensor, blocks: int) -> Tensor:
    """Pack codes of 4 bits `[..., outputs, inputs / 2]` by a block's halves, where neighbours share a byte."""
    pairs = torch.stack((codes & 15, codes >> 4), -1)
    first, second = pairs.view(*codes.shape[:-1], blocks, 2, -1).unbind(-2)
    return pack_int4(torch.stack((first, second), -1).view(*codes.shape[:-1], -1))


def _find_common(lists: list[list[str]]) -> list[str]:
    """Return the beginning that all lists share; no list is used up where they differ."""
    same: list[str] = []
    for each in zip(*lists, strict=False):
        if len(set(each)) > 1:
            break
        same.append(each[0])
    return same
