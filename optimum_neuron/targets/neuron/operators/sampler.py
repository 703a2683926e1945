# SPDX-License-Identifier: Apache-2.0
"""The on-device sampler as an operator: tracing its thousand operators would take longer than lowering the node that stands for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, library

from ....step.sampling import sampler as sampling
from .collectives import all_gather


# Gives all ranks' tensors side by side along dimension 1.
GatherColumns = Callable[[Tensor], Tensor]


@library.custom_op("optimum_neuron::sample", mutates_args=())
def sample(
    logits: Tensor, sampling_params: Tensor, uniforms: Tensor, first: Tensor, vocab_size: int, ranks: int
) -> Tensor:
    """Sample `[rows]` int32 as `step.sampling.sampler.sample` of a rank among so many; all ranks get the same.

    `logits [rows, columns]` cover the rank's part of the vocabulary, and `first` is the token of its first column, an int32 number.
    """
    return written_out(None, logits, sampling_params, uniforms, first, vocab_size, ranks)


@sample.register_fake
def _(logits: Tensor, sampling_params: Tensor, uniforms: Tensor, first: Tensor, vocab_size: int, ranks: int) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


def written_out(
    gather: GatherColumns | None,
    logits: Tensor,
    params: Tensor,
    uniforms: Tensor,
    first: Tensor,
    vocab_size: int,
    ranks: int,
) -> Tensor:
    if ranks == 1:
        return sampling.sample(logits, params, uniforms)
    return sampling.sample(logits, params, uniforms, first, vocab_size, of_all(ranks, gather))


def largest_of_whole(logits: Tensor, sampling_params: Tensor, uniforms: Tensor) -> Tensor:
    """Return the argmax of each row: the choice of a step that leaves its logits for a sampler."""
    return sampling.first_largest(logits)[:, 0]


def of_all(ranks: int, gather: GatherColumns | None = None) -> sampling.Gather:
    """Return a gather that splits numbers in a row by rank; by default in operators of an exported graph."""
    columns = gather or (lambda own: own if ranks == 1 else all_gather(own, 1, ranks))
    return lambda own: columns(own).unflatten(1, (ranks, -1))


# The node of an exported graph.
SAMPLE = torch.ops.optimum_neuron.sample.default
