# SPDX-License-Identifier: Apache-2.0
"""Files of weights, one per rank, in the order in which graphs take them.

They are written tensor by tensor: memory holds the model and one tensor of a rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ....arrays import dtype_name
from ....artifact.weight_file import write_tensor_files
from ....artifact.weights import place, rank_weights_name
from ....step.features.codes.weight import pack_int4
from ..graphs.io import NARROW
from .plan import RANK_TENSOR, ShardPlan


@dataclass(frozen=True)
class FileWeight:
    """A tensor of a file of weights, made of tensors of the model."""

    parts: tuple[str, ...]  # names of the model's tensors, joined along the last dimension
    order: tuple[int, ...]  # of each part's dimensions, as `Tensor.permute` takes it
    # Of codes of 4 bits `[..., outputs, inputs / 2]`: a byte holds one input of a block's first half and one of its
    # second; 0: other weights.
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
        shapes = [[part(name)[dim] for dim in self.order] for name in self.parts]
        return (*shapes[0][:-1], sum(shape[-1] for shape in shapes))

    def tensor(self, part: Callable[[str], Tensor]) -> Tensor:
        """Return the tensor, from the parts by name; a view of a single part."""
        tensors = []
        for each in map(part, self.parts):
            if self.blocks:
                pairs = torch.stack((each & 15, each >> 4), -1)
                first, second = pairs.view(*each.shape[:-1], self.blocks, 2, -1).unbind(-2)
                each = pack_int4(torch.stack((first, second), -1).view(*each.shape[:-1], -1))
            tensors.append(each.permute(self.order))
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)


@dataclass(frozen=True)
class WeightLayout:
    """The weights that are stored otherwise than the model has them."""

    stored: tuple[FileWeight, ...] = ()  # in the order of their use
    replaced: frozenset[str] = frozenset()  # names of the model's tensors that graphs take in no other form


def _find_common(lists: list[list[str]]) -> list[str]:
    same = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*lists, strict=False))
    return [each[0] for each in same]


def write_sharded_weights(
    tensors: Mapping[str, Tensor], plan: ShardPlan, folder: Path, layout: WeightLayout = WeightLayout()
) -> dict[str, str]:
    """Write the file of weights of every rank; each of several ranks gets its own number.

    Args:
        tensors: of the whole model, as `weights.named_tensors` gives them.
        folder: the artifact's, with a folder for weights. A failure leaves incomplete files there.

    Returns:
        The tied names: alias to stored name, the same for all ranks.

    Raises:
        ValueError: a tensor has another shape than the plan was made for, or an integer that no device holds.
    """
    for name, tensor in tensors.items():
        found, expected = tuple(tensor.shape), plan.shapes.get(name)
        if found != expected:
            raise ValueError(f"{name} has shape {found}, and the plan is for {expected}; plan this model")
    tensors = {name: _narrow_tensor(name, tensor) for name, tensor in tensors.items()}
    tied = tied_names(tensors, plan)

    stored = {each.name: each for each in layout.stored}

    def make_part(name: str, rank: int) -> Tensor:
        if name == RANK_TENSOR:
            return torch.tensor([rank], dtype=torch.int32)
        if name in stored:
            return stored[name].tensor(lambda part: plan.shard(tensors[part], part, rank))
        return plan.shard(tensors[name], name, rank)

    # Types and shapes. The tensor that an alias names stays, whatever reads it.
    left_out = tied.keys() | (layout.replaced - set(tied.values()))
    files = {name: (tensors[name].dtype, plan.local_shape(name)) for name in tensors.keys() - left_out}
    files |= {name: (tensors[each.parts[0]].dtype, each.shape(plan.local_shape)) for name, each in stored.items()}
    if plan.world_size > 1:
        files[RANK_TENSOR] = torch.int32, (1,)
    names = sorted(files, key=lambda name: (-files[name][0].itemsize, name))
    paths = [folder / rank_weights_name(rank, plan.world_size) for rank in range(plan.world_size)]
    write_tensor_files(paths, [(name, *files[name]) for name in names], make_part)
    return tied


def _narrow_tensor(name: str, tensor: Tensor) -> Tensor:
    dtype = dtype_name(tensor.dtype)
    if dtype not in NARROW:
        return tensor
    narrow = tensor.to(getattr(torch, NARROW[dtype]))
    if not tensor.is_floating_point() and not torch.equal(narrow.to(tensor.dtype), tensor):
        raise ValueError(
            f"{name} is {dtype} with values from {tensor.min()} to {tensor.max()}, and a device has {NARROW[dtype]}; "
            f"use target='cpu'"
        )
    return narrow


def tied_names(tensors: Mapping[str, Tensor], plan: ShardPlan) -> dict[str, str]:
    """Return the tensors that share the memory, the cut and the type of an earlier one: alias to that one's name."""
    first: dict[tuple, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        key = (*place(tensor), plan.rules.get(name))
        if tensor.numel() and dtype_name(tensor.dtype) not in NARROW and first.setdefault(key, name) != name:
            tied[name] = first[key]
    return tied
