# SPDX-License-Identifier: Apache-2.0
"""Attention of chunk rows by nki-library's `attention_cte`, in its form for cached prefixes: one call per row.

Parameters and shapes are those of core/attention/attention_cte.py. `attention_tkg`, for decode rows, takes on-chip memory, so no graph can
call that.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ....step.attention import kv_cache
from ....step.attention.cached_attention import MASKED, CacheAttention, select_columns
from ....step.attention.coded_states import Stored
from ....step.attention.rows import AttentionCall, AttentionRows
from .kernel import Kernel, call_kernel, register


# Its documentation's limits.
_LARGEST_HEAD_DIM, _MOST_COLUMNS = 128, 131_072


def chunk_reference(
    q: Tensor, k: Tensor, v: Tensor, k_prior: Tensor, v_prior: Tensor, prior_used_len: Tensor
) -> Tensor:
    """Compute what the kernel does, `[heads, tokens, dim]`.

    Each query of `q [heads, tokens, dim]`, which is scaled, sees the first `prior_used_len [1]` of `k_prior`, `v_prior
    [kv_heads, columns, dim]`, and of the same tokens' `k`, `v [kv_heads, tokens, dim]` those up to its own.
    """
    kv_heads, tokens, columns = k.shape[0], q.shape[1], k_prior.shape[1]
    order = torch.arange(tokens, dtype=torch.int32, device=q.device)
    before = torch.arange(columns, dtype=torch.int32, device=q.device)[None] < prior_used_len[:, None]
    visible = torch.cat([before.expand(tokens, columns), order[None] <= order[:, None]], dim=1)
    queries = q.unflatten(0, (kv_heads, -1)).flatten(1, 2)
    scores = (queries @ torch.cat([k_prior, k], dim=1).transpose(1, 2)).float().unflatten(1, (-1, tokens))
    scores = torch.where(visible, scores, MASKED)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    output = (weights.flatten(1, 2).to(v.dtype) @ torch.cat([v_prior, v], dim=1)).float() * (1.0 / total).flatten(1, 2)
    return output.unflatten(1, (-1, tokens)).flatten(0, 1).to(q.dtype)


ATTENTION_CTE = register(
    Kernel(
        name="attention_cte",
        module="nkilib.core.attention.attention_cte",
        operands=("q", "k", "v", "k_prior", "v_prior", "prior_used_len"),
        # With a prefix its own scale has to be 1.
        arguments={"scale": 1.0, "causal_mask": True, "tp_q": True, "tp_k": True, "tp_out": False},
        reference=chunk_reference,
    )
)


def attend_chunks(otherwise: CacheAttention) -> CacheAttention:
    """Return attention of chunk rows by the kernel where it computes what a layer does, else by `otherwise`."""

    def attend(call: AttentionCall, group: AttentionRows, query: Tensor, keys: Stored, values: Stored) -> Tensor:
        coded = not isinstance(keys, Tensor) or not isinstance(values, Tensor)  # which the kernel does not read
        if group.decodes or coded or not _supports_chunks(call, group, keys, values):
            return otherwise(call, group, query, keys, values)
        seen, whole = group.seen(None), (cast(Tensor, keys), cast(Tensor, values))
        keys, values = (kv_cache.read_cache(each, group.blocks, len(query), group.context_length) for each in whole)
        # Zeros stand for what no token of a row sees. The key of a broken token stays, so that who sees it is NaN.
        values = select_columns(values, seen & (kv_cache.broken_columns(keys) == 0))
        keys = select_columns(keys, seen)
        rows = []
        for row in range(len(query)):
            scaled, past = query[row] * call.scaling, (keys[row], values[row])
            start = group.position_ids[row, :1].clamp(min=0)  # idle rows and padding may have any
            own = (start + torch.arange(query.shape[2], dtype=torch.int32)).clamp(max=keys.shape[2] - 1)
            operands = [scaled, *(each.index_select(1, own) for each in past), *past, start]
            rows.append(call_kernel(ATTENTION_CTE.name, operands))
        return torch.stack(rows).transpose(1, 2)

    return attend


def _supports_chunks(call: AttentionCall, group: AttentionRows, keys: Stored, values: Stored) -> bool:
    others = (call.sliding_window, call.softcap, call.sinks, call.column_bias)
    plain = call.attends_to_all and all(each is None for each in others)
    alike = keys.shape[-1] == values.shape[-1] <= _LARGEST_HEAD_DIM
    return plain and alike and group.context_length + group.position_ids.shape[1] <= _MOST_COLUMNS
