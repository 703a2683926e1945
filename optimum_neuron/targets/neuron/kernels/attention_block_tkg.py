# SPDX-License-Identifier: Apache-2.0
"""Attention of decode rows by nki-library's `attention_block_tkg`: one call for all rows of a key head.

Parameters and shapes are those of experimental/transformer/attention_block_tkg.py and of its torch reference. The kernel can project
and rotate, too. A step has done both, so the one projection that it needs is by the identity, which changes no bit, and the rest is
off. `attention_tkg` inside of it takes on-chip memory, so no graph can call that.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....step.attention import kv_cache
from ....step.attention.cached_attention import MASKED, DecodeAttention, select_columns
from ....step.attention.call import AttentionCall
from ....step.attention.coded_states import Stored
from ....step.attention.rows import AttentionRows
from .kernel import NKI, NKI_LIBRARY, EnumMember, Kernel, call_kernel, register


_LARGEST_HEAD_DIM = 128
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


def reference(x: Tensor, w_qkv: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
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
        reference=reference,
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
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor):  # codes, which the kernel does not read
            return otherwise(call, group, query, keys, values, key, value)
        if not _is_supported(call, group, query, key, value):
            return otherwise(call, group, query, keys, values, key, value)
        keys, values = (kv_cache.read_cache(each, None, rows, group.context_length) for each in (keys, values))
        earlier = group.earlier(call.sliding_window, 0, group.context_length)[:, 0]
        # The kernel selects scores; weights of 0 it multiplies.
        values = select_columns(values, earlier)
        # No earlier token can be in the last column, where the kernel has the row's own.
        visible = torch.cat([earlier[:, :-1], torch.ones(rows, 1, dtype=torch.bool)], 1).to(torch.uint8).t()
        queries = (query[:, :, 0] * call.scaling).unflatten(1, (kv_heads, -1))
        heads = [
            _attend_head(queries[:, head], key[:, head], value[:, head], keys[:, head], values[:, head], visible)
            for head in range(kv_heads)
        ]
        return torch.cat(heads, dim=1).permute(0, 3, 1, 2)

    return attend


def _attend_head(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attend with `query [rows, heads, dim]` over one key head, with `key`, `value [rows, dim]` of the own tokens.

    Args:
        visible: `[columns, rows]` uint8.

    Returns:
        `[rows, heads, dim, 1]`.
    """
    heads = query.shape[1]
    own = torch.cat([query.flatten(1), key, value], 1)
    width = own.shape[1]
    row = pad(own, (0, -width % _TILES))[:, None]
    order = torch.arange(row.shape[-1], dtype=torch.int32)
    identity = (order[:, None] == order[None, :width]).to(row.dtype)
    mask = visible[:, :, None, None].expand(-1, -1, heads, -1).contiguous()
    output, _, _ = call_kernel(ATTENTION_BLOCK_TKG.name, [row, identity, keys, values, mask])
    return output


def _is_supported(call: AttentionCall, group: AttentionRows, query: Tensor, key: Tensor, value: Tensor) -> bool:
    dim, columns = key.shape[-1], group.context_length
    slots = group.blocks is None and group.owned is None  # the kernel reads row i of a cache
    plain = slots and call.softcap is None and call.sinks is None and call.column_bias is None and call.attends_to_all
    alike = dim == value.shape[-1] <= _LARGEST_HEAD_DIM and dim % 2 == 0
    tiles = columns % _TILES == 0 or columns == _TILE
    return plain and alike and tiles and query.shape[0] * query.shape[1] <= _MOST_QUERIES * key.shape[1]
