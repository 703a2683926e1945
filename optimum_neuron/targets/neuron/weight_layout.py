# SPDX-License-Identifier: Apache-2.0
"""How weights lie in an artifact's files: in the order of dimensions in which graphs take them, and joined where they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StoredWeight:
    """A tensor of a file of weights that is made of those of the model.

    Attributes:
        parts: names of the model's tensors, which are side by side along the last dimension.
        order: of each part's dimensions, as `Tensor.permute` takes it.
    """

    parts: tuple[str, ...]
    order: tuple[int, ...]

    @property
    def name(self) -> str:
        """What graphs and files call it: `a.q.weight` and `a.k.weight` are `a.q-k.weight.order_1_0`; no model has such names."""
        split = [part.split(".") for part in self.parts]
        head = _common(split)
        tail = _common([part[: len(head) - 1 if head else None : -1] for part in split])[::-1]
        middles = [".".join(part[len(head) : len(part) - len(tail)]) for part in split]
        joined = [*head, *filter(None, ["-".join(middles)]), *tail]
        return ".".join([*joined, "_".join(["order", *map(str, self.order)])])

    def shape(self, part: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
        """The shape, from those of the parts by name."""
        shapes = [[part(name)[dim] for dim in self.order] for name in self.parts]
        return (*shapes[0][:-1], sum(shape[-1] for shape in shapes))

    def tensor(self, part: Callable[[str], Tensor]) -> Tensor:
        """The tensor, from the parts by name; a view of a single part."""
        tensors = [part(name).permute(self.order) for name in self.parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)


@dataclass(frozen=True)
class WeightLayout:
    """What of a model's weights is stored otherwise than the model has it.

    Attributes:
        stored: in the order of their use.
        replaced: names of the model's tensors that graphs take in no other form.
    """

    stored: tuple[StoredWeight, ...] = ()
    replaced: frozenset[str] = frozenset()


def _common(lists: list[list[str]]) -> list[str]:
    """What all lists begin with, of which none is used up where they differ."""
    same: list[str] = []
    for each in zip(*lists, strict=False):
        if len(set(each)) > 1:
            break
        same.append(each[0])
    return same
