# SPDX-License-Identifier: Apache-2.0
"""The on-device sampler as an operator: tracing its thousand operators would take longer than lowering the node that stands for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, library

from ....step.sampling import sampler as sampling
from .collectives import all_gather


# All ranks' tensors side by side along dimension 1.
GatherColumns = Callable[[Tensor], Tensor]


@library.custom_op("optimum_neuron::sample", mutates_args=())
def sample(
    logits: Tensor, sampling_params: Tensor, uniforms: Tensor, first: Tensor, vocab_size: int, ranks: int
) -> Tensor:
    """Sample `[rows]` int32 as `step.sampling.sampler.sample` of a rank among so many; all ranks get the same.

    Args:
        logits: `[rows, columns]` float32, of the rank's part of the vocabulary.
        sampling_params, uniforms: as in `step.sampling.sampler.sample`.
        first: int32 number, the token of the rank's first column.
        vocab_size: of all ranks.
    """
    return written_out(partial(gather_columns, ranks), logits, sampling_params, uniforms, first, vocab_size, ranks)


@sample.register_fake
def _(logits: Tensor, sampling_params: Tensor, uniforms: Tensor, first: Tensor, vocab_size: int, ranks: int) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


def gather_columns(ranks: int, own: Tensor) -> Tensor:
    return own if ranks == 1 else all_gather(own, 1, ranks)


def written_out(
    gather: GatherColumns,
    logits: Tensor,
    sampling_params: Tensor,
    uniforms: Tensor,
    first: Tensor,
    vocab_size: int,
    ranks: int,
) -> Tensor:
    """Compute `sample` in elementary operators."""
    if ranks == 1:
        return sampling.sample(logits, sampling_params, uniforms)
    return sampling.sample(logits, sampling_params, uniforms, first, vocab_size, of_all(ranks, gather))


def largest_of_whole(logits: Tensor, sampling_params: Tensor, uniforms: Tensor) -> Tensor:
    """Return the argmax of each row: the choice of a step that leaves its logits for a sampler."""
    return sampling.first_largest(logits)[:, 0]


def of_all(ranks: int, gather: GatherColumns | None = None) -> sampling.Gather:
    """Return a gather that splits numbers in a row by rank; by default in operators of an exported graph."""
    columns = gather or partial(gather_columns, ranks)
    return lambda own: columns(own).unflatten(1, (ranks, -1))


# The node of an exported graph.
SAMPLE = torch.ops.optimum_neuron.sample.default
