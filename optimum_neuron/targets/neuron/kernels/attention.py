# SPDX-License-Identifier: Apache-2.0
"""Attention by kernels of nki-library: `attention_cte` for chunk rows, `attention_block_tkg` for decode rows.

Parameters and shapes of the first are those of core/attention/attention_cte.py, in its form for cached prefixes: one call per row. Those of the
second are in experimental/transformer/attention_block_tkg.py and its torch reference: one call for all rows of a key head. It can project
and rotate, too. A step has done both, so the one projection that it needs is by the identity, which changes no bit, and the rest is off.
`attention_tkg` inside of it takes on-chip memory, so no graph can call that.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....step.attention import kv_cache
from ....step.attention.cached_attention import MASKED, CacheAttention, DecodeAttention, select_columns
from ....step.attention.coded_states import Stored
from ....step.attention.rows import AttentionCall, AttentionRows
from .kernel import NKI, NKI_LIBRARY, EnumMember, Kernel, call_kernel, register


# What its documentation says that it takes.
_LARGEST_HEAD_DIM, _MOST_COLUMNS = 128, 131_072
# Query heads of all rows that share a key head: those that one tile holds ("batch * sequence_tkg * q_heads <= pmax").
_MOST_QUERIES = 128
# Columns are shared by the cores of a logical one, in whole tiles of 128, from 256 on; so are values of a row.
_TILES, _TILE = 256, 128
_PLAIN = EnumMember("nkilib.core.utils.common_types", "QuantizationType", "NONE")

# Parameters of what it does besides: left out, and switched off.
_OMITTED = (
    "X_hidden_dim_actual", "rmsnorm_X_eps", "rmsnorm_X_gamma", "bias_qkv", "weight_dequant_scale_qkv",
    "input_dequant_scale_qkv", "rmsnorm_QK_pre_rope_W_Q", "rmsnorm_QK_pre_rope_W_K", "cos", "sin",
    "rmsnorm_QK_post_rope_W_Q", "rmsnorm_QK_post_rope_W_K", "active_blocks_table", "sink",
    "kv_cache_update_idx", "W_out", "bias_out", "weight_dequant_scale_out", "input_dequant_scale_out",
)  # fmt: skip
_OFF = (
    "rmsnorm_X_enabled", "rmsnorm_QK_pre_rope_enabled", "rmsnorm_QK_post_rope_enabled", "K_cache_transposed",
    "update_cache", "transposed_out", "out_in_sb",
)  # fmt: skip


def chunk_reference(
    q: Tensor, k: Tensor, v: Tensor, k_prior: Tensor, v_prior: Tensor, prior_used_len: Tensor
) -> Tensor:
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
        reference=chunk_reference,
    )
)


def attend_chunks(otherwise: CacheAttention) -> CacheAttention:
    """Return attention of chunk rows by the kernel where it computes what a layer does, else by `otherwise`."""

    def attend(call: AttentionCall, group: AttentionRows, query: Tensor, keys: Stored, values: Stored) -> Tensor:
        if group.decodes or not _supports_chunks(call, group, keys, values):
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
            rows += call_kernel(ATTENTION_CTE.name, operands)
        return torch.stack(rows).transpose(1, 2)

    return attend


def _supports_chunks(call: AttentionCall, group: AttentionRows, keys: Stored, values: Stored) -> bool:
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor):  # codes, which the kernel does not read
        return False
    others = (call.sliding_window, call.softcap, call.sinks, call.column_bias)
    plain = call.attends_to_all and all(each is None for each in others)
    alike = keys.shape[-1] == values.shape[-1] <= _LARGEST_HEAD_DIM
    return plain and alike and group.context_length + group.position_ids.shape[1] <= _MOST_COLUMNS


def decode_reference(x: Tensor, w_qkv: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Compute what the kernel does, with scores as they are.

    Args:
        x: `[rows, 1, hidden]`.
        w_qkv: `[hidden, dim * (heads + 2)]`: queries, the key and the value of a row's own token.
        k_cache, v_cache: `[rows, columns, dim]`; the own token replaces the last column.
        mask: `[columns, rows, heads, 1]` uint8, 1 where a query sees a column.

    Returns:
        `[rows, heads, dim, 1]`; and the own keys `[dim, rows, 1]` and values `[rows, 1, 1, dim]`.
    """
    dim = k_cache.shape[-1]
    projected = (x[:, 0] @ w_qkv).unflatten(-1, (-1, dim))
    query, key, value = projected[:, :-2], projected[:, -2:-1], projected[:, -1:]
    keys, values = (torch.cat([past[:, :-1], own], 1) for past, own in ((k_cache, key), (v_cache, value)))
    visible = mask[:, :, :, 0].permute(1, 2, 0) != 0
    scores = torch.where(visible, (query @ keys.transpose(1, 2)).float(), MASKED)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    output = (weights.to(values.dtype) @ values).float() * (1.0 / total)
    return output.to(x.dtype)[..., None], key.permute(2, 0, 1).contiguous(), value[:, None].clone()


ATTENTION_BLOCK_TKG = register(
    Kernel(
        name="attention_block_tkg",
        module="nkilib.experimental.transformer.attention_block_tkg",
        function="attention_block_tkg",
        packages=(NKI, NKI_LIBRARY),
        operands=("X", "W_qkv", "K_cache", "V_cache", "attention_mask"),
        arguments=dict.fromkeys(_OMITTED)
        | dict.fromkeys(_OFF, False)
        | {
            "quantization_type_qkv": _PLAIN,
            "rmsnorm_QK_pre_rope_eps": 0.0,
            "rope_contiguous_layout": True,
            "rmsnorm_QK_post_rope_eps": 0.0,
            "softmax_scale": 1.0,
            "quantization_type_out": _PLAIN,
        },
        reference=decode_reference,
    )
)


def attend_decodes(otherwise: DecodeAttention) -> DecodeAttention:
    """Return attention of decode rows by the kernel where it computes what a layer does, else by `otherwise`."""

    def attend(
        call: AttentionCall,
        group: AttentionRows,
        query: Tensor,
        keys: Stored,
        values: Stored,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        rows, kv_heads, _ = key.shape
        coded = not isinstance(keys, Tensor) or not isinstance(values, Tensor)  # which the kernel does not read
        if coded or not _supports_decodes(call, group, query, key, value):
            return otherwise(call, group, query, keys, values, key, value)
        whole = cast(Tensor, keys), cast(Tensor, values)
        keys, values = (kv_cache.read_cache(each, None, rows, group.context_length) for each in whole)
        earlier = group.earlier(call.sliding_window, 0, group.context_length)[:, 0]
        # The kernel selects scores; weights of 0 it multiplies.
        values = select_columns(values, earlier)
        # No earlier token can be in the last column, where the kernel has the row's own.
        visible = torch.cat([earlier[:, :-1], torch.ones(rows, 1, dtype=torch.bool)], 1).to(torch.uint8).t()
        queries = (query[:, :, 0] * call.scaling).unflatten(1, (kv_heads, -1))
        outputs = []  # [rows, heads, dim, 1]
        for head in range(kv_heads):
            of_head = [each[:, head] for each in (queries, key, value, keys, values)]
            own = torch.cat([of_head[0].flatten(1), *of_head[1:3]], 1)
            width = own.shape[1]
            row = pad(own, (0, -width % _TILES))[:, None]
            order = torch.arange(row.shape[-1], dtype=torch.int32)
            identity = (order[:, None] == order[None, :width]).to(row.dtype)
            mask = visible[:, :, None, None].expand(-1, -1, queries.shape[2], -1).contiguous()
            outputs.append(call_kernel(ATTENTION_BLOCK_TKG.name, [row, identity, *of_head[3:], mask])[0])
        return torch.cat(outputs, dim=1).permute(0, 3, 1, 2)

    return attend


def _supports_decodes(call: AttentionCall, group: AttentionRows, query: Tensor, key: Tensor, value: Tensor) -> bool:
    dim, columns = key.shape[-1], group.context_length
    # Of slots alone: the kernel reads row i of a cache.
    others = (group.blocks, group.owned, call.softcap, call.sinks, call.column_bias)
    plain = call.attends_to_all and all(each is None for each in others)
    alike = dim == value.shape[-1] <= _LARGEST_HEAD_DIM and dim % 2 == 0
    tiles = columns % _TILES == 0 or columns == _TILE
    return plain and alike and tiles and query.shape[0] * query.shape[1] <= _MOST_QUERIES * key.shape[1]
