# SPDX-License-Identifier: Apache-2.0
"""Collectives over the ranks of tensor parallelism, as operators that stay nodes of an exported graph; on the CPU of torch.distributed."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, library


@library.custom_op("optimum_neuron::all_reduce", mutates_args=())
def all_reduce(x: Tensor, world_size: int) -> Tensor:
    """Return the sum of all ranks' `x`; raise RuntimeError where this process is not one of `world_size` ranks."""
    _check_ranks(world_size)
    total = x.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total)
    return total


@library.custom_op("optimum_neuron::all_gather", mutates_args=())
def all_gather(x: Tensor, dim: int, world_size: int) -> Tensor:
    """Return all ranks' `x` side by side along `dim`, in the order of their ranks; raise RuntimeError as `all_reduce`."""
    _check_ranks(world_size)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world_size)]
    distributed.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=dim)


@library.custom_op("optimum_neuron::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, dim: int, world_size: int) -> Tensor:
    """Return this rank's part along `dim` of the sum of all ranks' `x`; raise RuntimeError as `all_reduce`."""
    return all_reduce(x, world_size).chunk(world_size, dim)[distributed.get_rank()].clone()


@all_reduce.register_fake
def _(x: Tensor, world_size: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@all_gather.register_fake
def _(x: Tensor, dim: int, world_size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= world_size
    return x.new_empty(shape)


@reduce_scatter.register_fake
def _(x: Tensor, dim: int, world_size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= world_size
    return x.new_empty(shape)


def _check_ranks(world_size: int) -> None:
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    if ranks != world_size:
        raise RuntimeError(
            f"the graph runs on {world_size} ranks together, and this process is one of {ranks}; start "
            f"torch.distributed with world_size={world_size}"
        )


# The nodes of an exported graph.
ALL_REDUCE = torch.ops.optimum_neuron.all_reduce.default
ALL_GATHER = torch.ops.optimum_neuron.all_gather.default
REDUCE_SCATTER = torch.ops.optimum_neuron.reduce_scatter.default
