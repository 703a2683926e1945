# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .exact_sums import take_part
from .sampler import first_largest


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


def logprobs(logits: Tensor, chosen: Tensor, count: int) -> Logprobs:
    """Return those of chosen tokens `[rows]` int32 and of the `count` most likely ones, from `logits [rows, vocab]`."""
    tokens = torch.arange(logits.shape[-1], dtype=torch.int32)
    largest = logits.amax(-1, keepdim=True)
    whole = largest + (logits - largest).exp().sum(-1, keepdim=True).log()
    logit = torch.where(tokens == chosen[:, None], logits, 0.0).sum(-1, keepdim=True)
    above = (logits >= logit).float().sum(-1)
    found, best = (
        _select_largest(logits, tokens.float().expand(logits.shape), count)
        if count
        else (logits[:, :0], logits[:, :0])
    )
    return Logprobs((logit - whole)[:, 0], above.to(torch.int32), found.to(torch.int32), best - whole)


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
