# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a request's prompt, filled chunk by chunk from the logits of graphs that score."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors


class PromptScores:
    """Log-probabilities of each token of a prompt but the first, which follows from nothing.

    Args:
        count: most likely tokens in each place, next to the prompt's own; -1: all of the vocabulary.
        mode: vLLM's logprobs_mode; what changes logits where a token is chosen changes none of a prompt's.

    Attributes:
        table: what vLLM takes: a row for each such token, its own first, then the most likely ones.
    """

    def __init__(self, prompt_token_ids: Sequence[int], count: int, mode: str, vocab_size: int) -> None:
        self._next = torch.tensor(prompt_token_ids[1:], dtype=torch.int64)
        self._count = vocab_size if count == -1 else count
        self._logits = mode.endswith("logits")
        self.table = LogprobsTensors.empty_cpu(len(self._next), self._count + 1)

    def is_open_at(self, start: int) -> bool:
        """Return whether logits of the token at `start`, or of a later one, choose a token of the prompt."""
        return start < len(self._next)

    def is_whole_at(self, end: int) -> bool:
        """Return whether the table is whole once the first `end` tokens are in the cache."""
        return end > len(self._next)

    def add_logits(self, start: int, logits: Tensor) -> None:
        """Fill rows from logits `[tokens, vocab]` float32 of consecutive tokens, the first of them at `start`."""
        own = self._next[start : start + len(logits), None]
        scores = logits[: len(own)] if self._logits else logits[: len(own)].log_softmax(-1)
        chosen, best = scores.gather(-1, own), scores.topk(self._count)
        rows = slice(start, start + len(own))
        self.table.logprob_token_ids[rows] = torch.cat([own, best.indices], dim=1).int()
        self.table.logprobs[rows] = torch.cat([chosen, best.values], dim=1)
        self.table.selected_token_ranks[rows] = (scores >= chosen).sum(-1).int()
