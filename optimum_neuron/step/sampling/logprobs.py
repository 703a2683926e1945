# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens, from what a model's head returned: before temperature and whatever else chooses tokens.

Written with what every target can lower, and so that each rank can look at its own part of the vocabulary alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .exact_sums import take
from .sampler import Gather, alone, first_largest, real_columns


_LOWEST = torch.finfo(torch.float32).min


class Logprobs(NamedTuple):
    """Of the rows of a group.

    Attributes:
        chosen: `[rows]` float32, of the chosen tokens.
        ranks: `[rows]` int32, how many tokens are at least as likely as the chosen one: 1 is the best.
        tokens: `[rows, count]` int32, the most likely tokens, the best first; of equal ones the lower id first.
        best: `[rows, count]` float32, theirs.
    """

    chosen: Tensor
    ranks: Tensor
    tokens: Tensor
    best: Tensor


def logprobs(logits: Tensor, chosen: Tensor, count: int) -> Logprobs:
    """Those of chosen tokens and of the `count` most likely ones.

    Args:
        logits: `[rows, vocab]` float32.
        chosen: `[rows]` int32.
    """
    return logprobs_of_shard(logits, chosen, count, 0, logits.shape[-1], alone)


def logprobs_of_shard(
    logits: Tensor, chosen: Tensor, count: int, first: Tensor | int, vocab_size: int, gather: Gather
) -> Logprobs:
    """`logprobs` where each rank has the logits of its own part of the vocabulary.

    Args:
        logits, first, vocab_size, gather: as in `sampling.sample_shard`.

    Returns:
        The same on all ranks.
    """
    own = torch.arange(logits.shape[-1], dtype=torch.int32) + first
    logits = torch.where(real_columns(logits, first, vocab_size), logits, _LOWEST)
    largest = logits.amax(-1, keepdim=True)
    mine = own == chosen[:, None]
    parts = [
        largest,
        (logits - largest).exp().sum(-1, keepdim=True),
        torch.where(mine, logits, 0.0).sum(-1, keepdim=True),
    ]
    maxima, sums, found = gather(torch.cat(parts, dim=-1)).unbind(-1)
    highest = maxima.amax(-1, keepdim=True)
    whole = highest + (sums * (maxima - highest).exp()).sum(-1, keepdim=True).log()
    logit = found.sum(-1, keepdim=True)
    above = gather((logits >= logit).float().sum(-1, keepdim=True))[..., 0].sum(-1)
    tokens, best = _best(logits, own, count, gather)
    return Logprobs((logit - whole)[:, 0], above.to(torch.int32), tokens.to(torch.int32), best - whole)


def _best(logits: Tensor, own: Tensor, count: int, gather: Gather) -> tuple[Tensor, Tensor]:
    """The `count` largest of all ranks, `[rows, count]`: tokens in float32, and logits."""
    if not count:
        return logits[:, :0], logits[:, :0]
    tokens, values = _largest(logits, own.float().expand(logits.shape), count)
    ranks = gather(torch.cat([tokens, values], dim=-1))
    if ranks.shape[1] == 1:
        return tokens, values
    # Ranks are in the order of their tokens, and so are equal logits of a rank.
    return _largest(ranks[..., count:].flatten(1), ranks[..., :count].flatten(1), count)


def _largest(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """In rounds: the largest that is left, and of equal ones the first."""
    place = torch.arange(logits.shape[-1], dtype=torch.int32)
    chosen_tokens, values = [], []
    for _ in range(count):
        index = first_largest(logits)
        values.append(logits.amax(-1, keepdim=True))
        chosen_tokens.append(take(tokens[..., None], index[:, 0].float()))
        logits = torch.where(place == index, _LOWEST, logits)
    return torch.cat(chosen_tokens, dim=-1), torch.cat(values, dim=-1)
