# SPDX-License-Identifier: Apache-2.0
"""The on-device sampler as an operator: a node of a traced graph, written out when that is lowered.

Tracing its thousand operators would take longer than lowering them.
"""

from __future__ import annotations

from collections.abc import Callable

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
    """Sample as `step.sampling.sampler.sample` of a rank among so many.

    Args:
        logits: `[rows, columns]` float32, of the rank's part of the vocabulary.
        sampling_params, uniforms: as in `step.sampling.sampler.sample`.
        first: int32 number, the token of the rank's first column.
        vocab_size: of all ranks.

    Returns:
        `[rows]` int32, the same on all ranks.
    """
    return written_out(gathering(ranks), logits, sampling_params, uniforms, first, vocab_size, ranks)


@sample.register_fake
def _(logits: Tensor, sampling_params: Tensor, uniforms: Tensor, first: Tensor, vocab_size: int, ranks: int) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


def gathering(ranks: int) -> GatherColumns:
    """Return the gather of columns as operators of an exported graph."""

    def gather(own: Tensor) -> Tensor:
        return own if ranks == 1 else all_gather(own, 1, ranks)

    return gather


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
    return sampling.sample(logits, sampling_params, uniforms, first, vocab_size, of_all(gather, ranks))


def largest(logits: Tensor, first: Tensor, vocab_size: int, ranks: int) -> Tensor:
    """Return what `sample` chooses at temperature 0, in elementary operators."""
    return sampling.largest_of_shard(logits, first, vocab_size, of_all(gathering(ranks), ranks))


def largest_of_whole(logits: Tensor, sampling_params: Tensor, uniforms: Tensor) -> Tensor:
    """Return the argmax of each row: the choice of a step that leaves its logits for a sampler."""
    return sampling.first_largest(logits)[:, 0]


def of_all(gather: GatherColumns, ranks: int) -> sampling.Gather:
    """Return a gather that splits numbers in a row by rank."""
    return lambda own: gather(own).unflatten(1, (ranks, -1))


# The node of an exported graph.
SAMPLE = torch.ops.optimum_neuron.sample.default
