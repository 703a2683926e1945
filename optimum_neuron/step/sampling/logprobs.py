# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chosen tokens and of the most likely ones. Each rank looks at its own part of the vocabulary alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .exact_sums import take_part
from .sampler import Gather, alone, first_largest, real_columns


_LOWEST = torch.finfo(torch.float32).min


class Logprobs(NamedTuple):
    """Log-probabilities for the rows of a group: of the chosen tokens, and of the most likely ones, the best first.

    `ranks [rows]` int32 count the tokens that are at least as likely as the chosen one. `tokens [rows, count]` int32 are the most likely
    tokens, of equal ones the lower id first, and `best` their log-probabilities.
    """

    chosen: Tensor
    ranks: Tensor
    tokens: Tensor
    best: Tensor


def logprobs(
    logits: Tensor,
    chosen: Tensor,
    count: int,
    first: Tensor | int = 0,
    vocab_size: int | None = None,
    gather: Gather = alone,
) -> Logprobs:
    """Return those of chosen tokens `[rows]` int32 and of the `count` most likely ones, from a rank's `logits [rows, vocab]`."""
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
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
    tokens, best = _find_best(logits, own, count, gather)
    return Logprobs((logit - whole)[:, 0], above.to(torch.int32), tokens.to(torch.int32), best - whole)


def _find_best(logits: Tensor, own: Tensor, count: int, gather: Gather) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of all ranks, `[rows, count]`: tokens in float32, and logits."""
    if not count:
        return logits[:, :0], logits[:, :0]
    tokens, values = _select_largest(logits, own.float().expand(logits.shape), count)
    ranks = gather(torch.cat([tokens, values], dim=-1))
    if ranks.shape[1] == 1:
        return tokens, values
    # Ranks are in the order of their tokens, and so are equal logits of a rank.
    return _select_largest(ranks[..., count:].flatten(1), ranks[..., :count].flatten(1), count)


def _select_largest(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Select in rounds: the largest that is left, and of equal ones the first."""
    place = torch.arange(logits.shape[-1], dtype=torch.int32)
    chosen_tokens, values = [], []
    for _ in range(count):
        index = first_largest(logits)
        values.append(logits.amax(-1, keepdim=True))
        chosen_tokens.append(take_part(tokens[..., None], index[:, 0].float()))
        logits = torch.where(place == index, _LOWEST, logits)
    return torch.cat(chosen_tokens, dim=-1), torch.cat(values, dim=-1)
