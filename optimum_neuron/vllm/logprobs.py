# SPDX-License-Identifier: Apache-2.0
"""The log-probabilities of a step as vLLM takes them, of tokens that the graphs or its own sampler chose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.outputs import LogprobsLists

from ..runtime.logprobs import TokenLogprobs
from .requests import RowState


def join_logprobs(
    on_device: Sequence[tuple[RowState, int, TokenLogprobs | None]],
    on_host: Sequence[RowState],
    host_table: LogprobsLists | None,
    ids: Sequence[str],
) -> LogprobsLists | None:
    """Return one table of both; None where no request wants any.

    Args:
        host_table: rows in the order of `on_host`.
        ids: all requests of the step, in vLLM's order: those without log-probabilities get any row, and look at none.
    """
    chosen = [(state, token, each) for state, token, each in on_device if each is not None]
    if not chosen and host_table is None:
        return None
    rows = [state.request_id for state, _, _ in chosen]
    tables = [] if host_table is None else [host_table]
    if chosen:
        tables.insert(0, _make_table([(token, each) for _, token, each in chosen]))
    if host_table is not None:
        rows += [state.request_id for state in on_host]
    width = max(table.logprobs.shape[1] for table in tables)
    places = {request_id: row for row, request_id in enumerate(rows)}
    return LogprobsLists(
        np.concatenate([_widen_table(table.logprob_token_ids, width, 0) for table in tables]),
        np.concatenate([_widen_table(table.logprobs, width, -np.inf) for table in tables]),
        np.concatenate([table.sampled_token_ranks for table in tables]),
        [places.get(request_id, 0) for request_id in ids],
    )


def _make_table(chosen: Sequence[tuple[int, TokenLogprobs]]) -> LogprobsLists:
    """Return a row for each token: itself, then the most likely ones."""
    return LogprobsLists(
        np.array([[token, *each.tokens.tolist()] for token, each in chosen], dtype=np.int32),
        np.array([[float(each.chosen), *each.best.tolist()] for _, each in chosen], dtype=np.float32),
        np.array([int(each.ranks) for _, each in chosen], dtype=np.int32),
    )


def _widen_table(table: np.ndarray, width: int, fill: float) -> np.ndarray:
    """Add columns that no request reads: each reads as many as it asked for."""
    return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=fill)
