# SPDX-License-Identifier: Apache-2.0
"""The on-device sampler as an operator: tracing its thousand operators would take longer than lowering the node that stands for them.

A draw exchanges ranks' whole parts of the vocabulary, and a greedy choice the largest number of each, filled up: what is narrow may come back
wrong (sdk/gather_widths.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, library
from torch.nn.functional import pad

from ....step.sampling import sampler as sampling
from ..sdk.gather_widths import LEAST_WIDTH
from .collectives import all_gather


# Gives all ranks' tensors side by side along dimension 1.
GatherColumns = Callable[[Tensor], Tensor]


@library.custom_op("optimum_neuron::sample", mutates_args=())
def sample(
    logits: Tensor, sampling_params: Tensor, uniforms: Tensor, rank: Tensor, vocab_size: int, ranks: int
) -> Tensor:
    """Sample `[rows]` int32 as `step.sampling.sampler.sample` of a rank among so many; all ranks get the same.

    `logits [rows, columns]` cover the rank's part of the vocabulary, and `rank` is its own number, `[1]` int32.
    """
    return written_out(None, logits, sampling_params, uniforms, rank, vocab_size, ranks)


@sample.register_fake
def _(logits: Tensor, sampling_params: Tensor, uniforms: Tensor, rank: Tensor, vocab_size: int, ranks: int) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


def written_out(
    gather: GatherColumns | None,
    logits: Tensor,
    params: Tensor,
    uniforms: Tensor,
    rank: Tensor,
    vocab_size: int,
    ranks: int,
) -> Tensor:
    """Sample; of several rows each rank draws some, from the whole vocabulary, so that none does the work of all."""
    rows, whole = logits.shape[0], gather_columns(logits, vocab_size, ranks, gather)
    count = -(-rows // ranks)
    if count == rows:
        return sampling.sample(whole, params, uniforms)
    own = (_take_rows(each, rank, ranks, count) for each in (whole, params, uniforms[:, None]))
    tokens = sampling.sample(next(own), next(own), next(own)[:, 0])
    return gather_columns(tokens.float()[None], ranks * count, ranks, gather)[0, :rows].to(torch.int32)


def gather_columns(own: Tensor, size: int, ranks: int, gather: GatherColumns | None = None) -> Tensor:
    """Return `[rows, size]` of all ranks from a rank's `[rows, columns]` float32; by default in operators of an exported graph."""
    if ranks == 1:
        return own
    rows, columns = own.shape
    wide = pad(own, (0, max(0, -(-LEAST_WIDTH // rows) - columns)))
    gathered = all_gather(wide, 1, ranks) if gather is None else gather(wide)
    return gathered.unflatten(1, (ranks, -1))[..., :columns].flatten(1)[:, :size]


def _take_rows(x: Tensor, rank: Tensor, ranks: int, count: int) -> Tensor:
    """Return a rank's `count` rows of `[rows, n]`, with zeros beyond the last: by a selection, as an index may be computed wrong, too."""
    parts = pad(x, (0, 0, 0, ranks * count - x.shape[0])).unflatten(0, (ranks, count))
    return torch.where((torch.arange(ranks, dtype=torch.int32) == rank)[:, None, None], parts, 0.0).sum(0)


def largest_of_whole(logits: Tensor, sampling_params: Tensor, uniforms: Tensor) -> Tensor:
    """Return the argmax of each row: the choice of a step that leaves its logits for a sampler."""
    return sampling.first_largest(logits)[:, 0]


def largest_of_ranks(logits: Tensor, ranks: int) -> Tensor:
    """Return `[rows]`: the argmax of all ranks' columns, which none fills up; each sends its largest number and that one's column."""
    own = torch.cat([logits.amax(-1, keepdim=True), sampling.first_largest(logits).float()], dim=-1)
    found = gather_columns(own, 2 * ranks, ranks).unflatten(1, (ranks, 2))
    numbers = torch.arange(ranks, dtype=torch.int32)
    tokens = found[..., 1] + (numbers * logits.shape[1]).float()
    return torch.where(numbers == sampling.first_largest(found[..., 0]), tokens, 0.0).sum(-1).to(torch.int32)


# The node of an exported graph.
SAMPLE = torch.ops.optimum_neuron.sample.default
