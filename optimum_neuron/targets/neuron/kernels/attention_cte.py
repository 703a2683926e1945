# SPDX-License-Identifier: Apache-2.0
"""Attention of chunk rows by nki-library's `attention_cte`, in its form for cached prefixes: one call per row.

Parameters and shapes are those of core/attention/attention_cte.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....step.attention import kv_cache
from ....step.attention.cached_attention import MASKED, CacheAttention, select_columns
from ....step.attention.call import AttentionCall
from ....step.attention.coded_states import Stored
from ....step.attention.rows import AttentionRows
from .kernel import NKI, NKI_LIBRARY, Kernel, call_kernel, register


# What its documentation says that it takes.
_LARGEST_HEAD_DIM, _MOST_COLUMNS = 128, 131_072


def reference(q: Tensor, k: Tensor, v: Tensor, k_prior: Tensor, v_prior: Tensor, prior_used_len: Tensor) -> Tensor:
    """Compute what the kernel does.

    Args:
        q: `[heads, tokens, dim]`, multiplied with the scale of scores.
        k, v: `[kv_heads, tokens, dim]`, of the same tokens; each query sees those up to its own.
        k_prior, v_prior: `[kv_heads, columns, dim]`, of which every query sees the first.
        prior_used_len: `[1]` int32, how many.

    Returns:
        `[heads, tokens, dim]`.
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
        function="attention_cte",
        packages=(NKI, NKI_LIBRARY),
        operands=("q", "k", "v", "k_prior", "v_prior", "prior_used_len"),
        # With a prefix its own scale has to be 1.
        arguments={"scale": 1.0, "causal_mask": True, "tp_q": True, "tp_k": True, "tp_out": False},
        reference=reference,
    )
)


def attend_chunks(otherwise: CacheAttention) -> CacheAttention:
    """Return attention of chunk rows by the kernel where it computes what a layer does, else by `otherwise`."""

    def attend(call: AttentionCall, group: AttentionRows, query: Tensor, keys: Stored, values: Stored) -> Tensor:
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor):  # codes, which the kernel does not read
            return otherwise(call, group, query, keys, values)
        if group.decodes or not _is_supported(call, group, keys, values):
            return otherwise(call, group, query, keys, values)
        seen = group.seen(None)
        keys, values = (
            kv_cache.read_cache(each, group.blocks, len(query), group.context_length) for each in (keys, values)
        )
        # Zeros stand for what no token of a row sees. The key of a broken token stays, so that who sees it is NaN.
        values = select_columns(values, seen & (kv_cache.broken_columns(keys) == 0))
        keys = select_columns(keys, seen)
        rows = [
            _attend_row(query[row] * call.scaling, keys[row], values[row], group.position_ids[row, :1])
            for row in range(len(query))
        ]
        return torch.stack(rows).transpose(1, 2)

    return attend


def _attend_row(query: Tensor, keys: Tensor, values: Tensor, first: Tensor) -> Tensor:
    """Attend with `query [heads, tokens, dim]` over a slot's `keys`, `values [kv_heads, columns, dim]`, with the row's tokens.

    Args:
        first: `[1]`, the position of the row's first token; idle rows and padding may have any.
    """
    start = first.clamp(min=0)
    own = (start + torch.arange(query.shape[1], dtype=torch.int32)).clamp(max=keys.shape[1] - 1)
    operands = [query, keys.index_select(1, own), values.index_select(1, own), keys, values, start]
    (output,) = call_kernel(ATTENTION_CTE.name, operands)
    return output


def _is_supported(call: AttentionCall, group: AttentionRows, keys: Tensor, values: Tensor) -> bool:
    plain = call.attends_to_all and call.sliding_window is None and call.softcap is None and call.sinks is None
    plain = plain and call.column_bias is None
    alike = keys.shape[-1] == values.shape[-1] <= _LARGEST_HEAD_DIM
    return plain and alike and group.context_length + group.position_ids.shape[1] <= _MOST_COLUMNS
