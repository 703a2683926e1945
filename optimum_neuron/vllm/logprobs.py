# SPDX-License-Identifier: Apache-2.0
"""The log-probabilities of a step as vLLM takes them: of tokens that the graphs chose, and of those that its sampler did."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.outputs import LogprobsLists

from ..step.sampling.logprobs import Logprobs
from .requests import SlotRequest


def join_logprobs(
    on_device: Sequence[tuple[SlotRequest, int, Logprobs | None]],
    on_host: Sequence[SlotRequest],
    of_host: LogprobsLists | None,
    ids: Sequence[str],
) -> LogprobsLists | None:
    """One table of both; None where nobody wants any.

    Args:
        of_host: rows in the order of `on_host`.
        ids: all requests of the step, in vLLM's order: those without log-probabilities get any row, and look at none.
    """
    told = [(state, token, each) for state, token, each in on_device if each is not None]
    if not told and of_host is None:
        return None
    rows = [state.request_id for state, _, _ in told]
    tables = [] if of_host is None else [of_host]
    if told:
        tables.insert(0, _table([(token, each) for _, token, each in told]))
    if of_host is not None:
        rows += [state.request_id for state in on_host]
    width = max(table.logprobs.shape[1] for table in tables)
    places = {request_id: row for row, request_id in enumerate(rows)}
    return LogprobsLists(
        np.concatenate([_widened(table.logprob_token_ids, width, 0) for table in tables]),
        np.concatenate([_widened(table.logprobs, width, -np.inf) for table in tables]),
        np.concatenate([table.sampled_token_ranks for table in tables]),
        [places.get(request_id, 0) for request_id in ids],
    )


def _table(told: Sequence[tuple[int, Logprobs]]) -> LogprobsLists:
    """A row each: the chosen token, then the most likely ones."""
    return LogprobsLists(
        np.array([[token, *each.tokens.tolist()] for token, each in told], dtype=np.int32),
        np.array([[float(each.chosen), *each.best.tolist()] for _, each in told], dtype=np.float32),
        np.array([int(each.ranks) for _, each in told], dtype=np.int32),
    )


def _widened(table: np.ndarray, width: int, fill: float) -> np.ndarray:
    """With columns that nobody looks at: a request looks at as many as it asked for."""
    return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=fill)
