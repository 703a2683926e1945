# SPDX-License-Identifier: Apache-2.0
"""One file of weights per rank, written tensor by tensor: beside the model, memory holds one shard of one tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ....artifacts.tensor_file import DTYPES
from ....artifacts.weights import rank_weights_name
from .plan import RANK_TENSOR, ShardPlan


_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_ALIGNMENT = 8


def write_sharded_weights(tensors: Mapping[str, Tensor], plan: ShardPlan, folder: Path) -> dict[str, str]:
    """Writes `weights/tp<rank>.safetensors` for every rank, each with the rank's own number.

    Args:
        tensors: of the whole model, as `weights.named_tensors` gives them.
        folder: the artifact's, with a folder for weights. A failure leaves incomplete files there.

    Returns:
        The tied names: alias to stored name, the same for all ranks.

    Raises:
        ValueError: a tensor has another shape than the plan was made for.
    """
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != plan.shapes.get(name):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, and the plan is for {plan.shapes.get(name)}; make a plan of "
                f"this model"
            )
    stored, tied = _untie(tensors, plan)
    # Falling alignment, as safetensors' own files have it.
    names = sorted([*stored, RANK_TENSOR], key=lambda name: (-_dtype(stored, name).itemsize, name))
    header = _header([(name, _dtype(stored, name), _shape(plan, name)) for name in names])
    for rank in range(plan.world_size):
        with (folder / rank_weights_name(rank, plan.world_size)).open("wb") as file:
            file.write(header)
            for name in names:
                file.write(_bytes(_part(stored, plan, name, rank)))
    return tied


def _part(stored: Mapping[str, Tensor], plan: ShardPlan, name: str, rank: int) -> Tensor:
    if name == RANK_TENSOR:
        return torch.tensor([rank], dtype=torch.int32)
    return plan.shard(stored[name], name, rank)


def _bytes(part: Tensor) -> memoryview:
    return part.contiguous().flatten().view(torch.uint8).numpy().data


def _dtype(stored: Mapping[str, Tensor], name: str) -> torch.dtype:
    return torch.int32 if name == RANK_TENSOR else stored[name].dtype


def _shape(plan: ShardPlan, name: str) -> tuple[int, ...]:
    return (1,) if name == RANK_TENSOR else plan.local_shape(name)


def _untie(tensors: Mapping[str, Tensor], plan: ShardPlan) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors to store, and names of those that are the same memory cut in the same way."""
    first: dict[tuple, str] = {}
    stored, tied = {}, {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), plan.rules.get(name))
        if tensor.numel() and first.setdefault(key, name) != name:
            tied[name] = first[key]
        else:
            stored[name] = tensor
    return stored, tied


def _header(entries: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """The start of a safetensors file: the length of what follows, and where each tensor lies."""
    described, offset = {}, 0
    for name, dtype, shape in entries:
        end = offset + math.prod(shape) * dtype.itemsize
        described[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
