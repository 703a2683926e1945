# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens, from logits on the host. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class TokenLogprobs(NamedTuple):
    """Log-probabilities for the rows of a group.

    Attributes:
        chosen: `[rows]` float32, of the chosen tokens.
        ranks: `[rows]` int32, how many tokens are at least as likely as the chosen one: 1 is the best.
        tokens: `[rows, count]` int32, the most likely tokens, the best first; of equal ones the lower id first.
        best: `[rows, count]` float32, theirs.
    """

    chosen: np.ndarray
    ranks: np.ndarray
    tokens: np.ndarray
    best: np.ndarray


def score_tokens(logits: np.ndarray, chosen: np.ndarray, count: int) -> TokenLogprobs:
    """Return log-probabilities of `chosen` `[rows]` int32, and of the `count` most likely tokens of `logits` `[rows, vocab]`."""
    largest = logits.max(-1, keepdims=True)
    whole = largest + np.log(np.exp(logits - largest).sum(-1, keepdims=True))
    logit = np.take_along_axis(logits, chosen[:, None], -1)
    ranks = (logits >= logit).sum(-1, dtype=np.int32)
    tokens = np.empty((len(logits), count), np.int32)
    for row, places in zip(logits, tokens, strict=True):
        if count:
            likely = np.flatnonzero(row >= np.partition(row, -count)[-count])  # by id, which a stable sort keeps
            places[:] = likely[np.argsort(-row[likely], kind="stable")[:count]]
    return TokenLogprobs((logit - whole)[:, 0], ranks, tokens, np.take_along_axis(logits, tokens, -1) - whole)
