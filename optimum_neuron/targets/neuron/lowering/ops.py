# SPDX-License-Identifier: Apache-2.0
"""The step's operators in the form that the Neuron compiler takes.

Attention by hand, because the lowering of scaled_dot_product_attention tests for rows without keys. Cache writes as one
scatter of rows. Equal to the reference within float32 noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....graphs import kv_cache
from ....graphs.attention import MASKED, MASKED_HALF, AttentionRows, select_columns
from ....graphs.interface import AttentionCall
from ....graphs.ops import StepOps


def attend_cache(call: AttentionCall, group: AttentionRows, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """As `graphs.attention.attend_cache`, with scores and softmax in float32, written out."""
    rows, heads, tokens, _ = query.shape
    keys = kv_cache.read(keys, group.seq_ids, rows, group.context_length)
    values = kv_cache.read(values, group.seq_ids, rows, group.context_length)
    kv_heads = keys.shape[1]
    query = query.unflatten(1, (kv_heads, heads // kv_heads)).flatten(2, 3)
    scores = (query @ keys.transpose(-1, -2)).float() * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores * (1.0 / call.softcap)) * call.softcap
    scores = scores.unflatten(2, (-1, tokens))  # [rows, kv_heads, group, tokens, context]
    values = select_columns(values, group.seen(call.sliding_window) & (kv_cache.broken(keys) == 0))
    fill = MASKED_HALF if query.dtype == torch.float16 else MASKED
    scores = torch.where(group.visible(call.sliding_window)[:, None, None], scores, fill)
    largest = scores.amax(-1, keepdim=True)
    sinks = None if call.sinks is None else call.sinks.float().view(1, kv_heads, -1, 1, 1)
    if sinks is not None:
        largest = torch.maximum(largest, sinks)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - largest)
    output = (weights / total).to(values.dtype).flatten(2, 3) @ values
    return output.unflatten(2, (heads // kv_heads, tokens)).flatten(1, 2).transpose(1, 2)


def write_cache(cache: Tensor, states: Tensor, rows: Tensor, columns: Tensor) -> None:
    """As `graphs.kv_cache.write`: one scatter of `head_dim` values per token and head, by an index of one number."""
    _, heads, length, dim = cache.shape
    head = torch.arange(heads, dtype=torch.int32)
    index = (rows[:, None] * heads + head[None, :]) * length + columns[:, None]
    cache.view(-1, dim).index_put_((index.flatten(),), states.reshape(-1, dim))


NEURON_OPS = StepOps(attend_cache=attend_cache, write_cache=write_cache)
