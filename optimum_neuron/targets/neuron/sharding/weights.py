# SPDX-License-Identifier: Apache-2.0
"""Files of weights, one per rank, written tensor by tensor: memory holds the model and one tensor of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ....artifact.weight_file import write_tensor_files
from ....artifact.weights import place, rank_weights_name
from ..graphs.io import NARROW
from ..graphs.weight_layout import WeightLayout
from .plan import RANK_TENSOR, ShardPlan


def write_sharded_weights(
    tensors: Mapping[str, Tensor], plan: ShardPlan, folder: Path, layout: WeightLayout | None = None
) -> dict[str, str]:
    """Write the file of weights of every rank; each of several ranks gets its own number.

    Args:
        tensors: of the whole model, as `weights.named_tensors` gives them.
        folder: the artifact's, with a folder for weights. A failure leaves incomplete files there.
        layout: how graphs take the weights; default, as the model has them.

    Returns:
        The tied names: alias to stored name, the same for all ranks.

    Raises:
        ValueError: a tensor has another shape than the plan was made for, or an integer that no device holds.
    """
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != plan.shapes.get(name):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, and the plan is for {plan.shapes.get(name)}; make a plan of "
                f"this model"
            )
    tensors = {name: _narrow_tensor(name, tensor) for name, tensor in tensors.items()}
    tied = tied_names(tensors, plan)
    files = _Files(tensors, plan, WeightLayout() if layout is None else layout, tied)
    described = [(name, files.dtype(name), files.shape(name)) for name in files.names]
    paths = [folder / rank_weights_name(rank, plan.world_size) for rank in range(plan.world_size)]
    write_tensor_files(paths, described, files.tensor)
    return tied


def _narrow_tensor(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor in the type in which graphs take it."""
    dtype = _dtype_name(tensor)
    if dtype not in NARROW:
        return tensor
    narrow = tensor.to(getattr(torch, NARROW[dtype]))
    if not tensor.is_floating_point() and not torch.equal(narrow.to(tensor.dtype), tensor):
        raise ValueError(
            f"{name} is {dtype} with values from {tensor.min()} to {tensor.max()}, and a device has {NARROW[dtype]}; "
            f"use target='cpu'"
        )
    return narrow


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def tied_names(tensors: Mapping[str, Tensor], plan: ShardPlan) -> dict[str, str]:
    """Return the tensors that share the memory and the cut of an earlier one: alias to that one's name.

    A tensor in another type than the model's is a copy, and tied to nothing.
    """
    first: dict[tuple, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        key = (*place(tensor), plan.rules.get(name))
        if tensor.numel() and _dtype_name(tensor) not in NARROW and first.setdefault(key, name) != name:
            tied[name] = first[key]
    return tied


class _Files:
    """The contents of the ranks' files, all under the same names."""

    def __init__(
        self, tensors: Mapping[str, Tensor], plan: ShardPlan, layout: WeightLayout, tied: Mapping[str, str]
    ) -> None:
        self._tensors, self._plan = tensors, plan
        self._stored = {each.name: each for each in layout.stored}
        # What an alias stands for stays, whoever reads it.
        left_out = tied.keys() | (layout.replaced - set(tied.values()))
        own = [name for name in tensors if name not in left_out]
        ranks = [RANK_TENSOR] if plan.world_size > 1 else []
        self.names = sorted([*own, *self._stored, *ranks], key=lambda name: (-self.dtype(name).itemsize, name))

    def dtype(self, name: str) -> torch.dtype:
        if name == RANK_TENSOR:
            return torch.int32
        return self._tensors[self._stored[name].parts[0] if name in self._stored else name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        if name == RANK_TENSOR:
            return (1,)
        stored = self._stored.get(name)
        return self._plan.local_shape(name) if stored is None else stored.shape(self._plan.local_shape)

    def tensor(self, name: str, rank: int) -> Tensor:
        """Return a rank's tensor."""
        if name == RANK_TENSOR:
            return torch.tensor([rank], dtype=torch.int32)
        stored = self._stored.get(name)
        return self._rank_part(rank, name) if stored is None else stored.tensor(partial(self._rank_part, rank))

    def _rank_part(self, rank: int, name: str) -> Tensor:
        return self._plan.shard(self._tensors[name], name, rank)
