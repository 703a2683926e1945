# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities as vLLM takes them: of the tokens of a step, from graphs and host, and of a request's prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from ..runtime.logprobs import TokenLogprobs


def join_logprobs(
    on_device: Sequence[tuple[str, int, TokenLogprobs]],
    on_host: Sequence[str],
    host_table: LogprobsLists | None,
    ids: Sequence[str],
) -> LogprobsLists | None:
    """Return one table of both; None where no request wants any.

    Args:
        on_device: requests that want log-probabilities of the graphs, with their tokens.
        on_host: requests of vLLM's sampler.
        host_table: rows in the order of `on_host`.
        ids: all requests of the step, in vLLM's order: those without log-probabilities get any row, and look at none.
    """
    rows, tables = [request_id for request_id, _, _ in on_device], []
    if on_device:  # in each row the token itself, then the most likely ones
        tables.append(
            LogprobsLists(
                np.array([[token, *each.tokens.tolist()] for _, token, each in on_device], dtype=np.int32),
                np.array([[float(each.chosen), *each.best.tolist()] for *_, each in on_device], dtype=np.float32),
                np.array([int(each.ranks) for *_, each in on_device], dtype=np.int32),
            )
        )
    if host_table is not None:
        rows += on_host
        tables.append(host_table)
    if not tables:
        return None
    width = max(table.logprobs.shape[1] for table in tables)
    places = {request_id: row for row, request_id in enumerate(rows)}
    return LogprobsLists(
        np.concatenate([_widen_table(table.logprob_token_ids, width, 0) for table in tables]),
        np.concatenate([_widen_table(table.logprobs, width, -np.inf) for table in tables]),
        np.concatenate([table.sampled_token_ranks for table in tables]),
        [places.get(request_id, 0) for request_id in ids],
    )


def _widen_table(table: np.ndarray, width: int, fill: float) -> np.ndarray:
    """Add columns that no request reads: each reads as many as it asked for."""
    return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=fill)


class PromptScores:
    """Log-probabilities of each token of a prompt but the first, filled piece by piece from the logits of graphs that score.

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
