# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a cache of blocks, read where they lie: no step gathers the keys and values of its rows.

Each physical block attends with the query of the row that owns it. A block of several rows attends once, with the queries of all rows.
A row then joins its blocks' partial results in the order of its text: a vector and a number per block and head. So neither the places
of a row's blocks nor its neighbours change a bit of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....step.attention import kv_cache
from ....step.attention.cached_attention import MASKED
from ....step.attention.coded_states import Stored, as_kept
from ....step.attention.rows import AttentionCall, OwnedBlocks
from . import attention


def attend_blocks(
    call: AttentionCall, owned: OwnedBlocks, query: Tensor, keys: Stored, values: Stored, key: Tensor, value: Tensor
) -> Tensor:
    """Attend as `attention.attend_decode`, with `keys`, `values [blocks, kv_heads, block_length, dim]`."""
    kv_heads = key.shape[1]
    query = attention.by_kv_head(query, kv_heads)
    heads = heads_at_once(len(owned.block_owner), query.shape[2], keys.shape[2], value.shape[-1])
    parts, own_call = [], call
    for first in range(0, kv_heads, heads):
        part = slice(first, first + heads)
        if call.column_bias is not None:  # only what is added to scores differs between heads
            own_call = replace(call, column_bias=call.column_bias.unflatten(0, (kv_heads, -1))[part].flatten(0, 1))
        parts.append(_attend_past(own_call, owned, query[:, part], keys[:, part], values[:, part]))
    output, total = parts[0] if len(parts) == 1 else (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    own = attention.own_token(call, query, as_kept(key, keys), as_kept(value, values))
    state = attention.with_sinks(call, attention.merge_attention_states(output, total, *own))
    return attention.by_token(state, value.dtype, 1)


def heads_at_once(blocks: int, group: int, block_length: int, value_dim: int) -> int:
    """Return the key/value heads, at least one, that keep scores and partial results to `attention.SCORES_LIMIT`."""
    return max(1, attention.SCORES_LIMIT // (4 * blocks * group * max(block_length, value_dim + 1)))


def _attend_past(
    call: AttentionCall, owned: OwnedBlocks, query: Tensor, keys: Stored, values: Stored
) -> attention.State:
    """Attend with `query [R, kv_heads, group, key_dim]` over the blocks of its rows."""
    rows, kv_heads, group, _ = query.shape
    blocks, length = len(owned.block_owner), keys.shape[2]
    visible, table = owned.seen(call.sliding_window, length), call.column_bias
    added = None if table is None else owned.added_bias(table, length)
    # A broken token's values may stay: the owner alone sees the block, and is NaN by its scores.
    every = query.index_select(0, owned.block_owner)
    read = keys[:blocks], values[:blocks]
    state = attention.attend_columns(call, every, *read, visible[:, None], visible[:, 0], added)
    entries = [_as_entries(*state)]
    if owned.shared_blocks is not None:
        keys, values = (each.index_select(0, owned.shared_blocks) for each in (keys, values))
        visible = owned.seen(call.sliding_window, length, shared=True)
        kept = visible.any(1) & (kv_cache.broken_columns(keys) == 0)
        every = query.permute(1, 2, 0, 3).flatten(1, 2)[None].expand(len(keys), -1, -1, -1)
        added = None if table is None else owned.added_bias(table, length, shared=True)
        state = attention.attend_columns(call, every, keys, values, visible[:, None], kept, added)
        # [X, kv_heads, group * R, ...] to [X * R, kv_heads, group, ...]
        entries.append(_as_entries(*(each.unflatten(2, (group, rows)).movedim(3, 1).flatten(0, 1) for each in state)))
    width = entries[0].shape[1]
    nothing = torch.cat([torch.zeros(1, width - kv_heads * group), torch.full((1, kv_heads * group), MASKED)], dim=1)
    return _join_entries(torch.cat([*entries, nothing]), owned.joined, (kv_heads, group))


def _as_entries(output: Tensor, total: Tensor) -> Tensor:
    """Put an entry's outputs and then its log-sum-exps into one row: they are gathered together."""
    return torch.cat([output.flatten(1), total.flatten(1)], dim=1)


def _join_entries(entries: Tensor, joined: Tensor, sizes: tuple[int, int]) -> attention.State:
    """Join each row's entries to one state: `[R, kv_heads, group, value_dim]` and its log-sum-exp."""
    rows, places = joined.shape
    heads = sizes[0] * sizes[1]
    at_once = max(1, attention.SCORES_LIMIT // (4 * rows * entries.shape[1]))
    state: attention.State | None = None
    for start in range(0, places, at_once):
        some = joined[:, start : start + at_once]
        found = entries.index_select(0, some.flatten()).unflatten(0, (rows, -1))
        output, total = found[..., :-heads], found[..., -heads:]
        part = attention.join_attention_states(output.unflatten(2, (*sizes, -1)), total.unflatten(2, sizes), 1)
        state = part if state is None else attention.merge_attention_states(*state, *part)
    assert state is not None
    return state
