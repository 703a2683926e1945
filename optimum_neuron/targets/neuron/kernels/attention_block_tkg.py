# SPDX-License-Identifier: Apache-2.0
"""Attention of decode rows by nki-library's `attention_block_tkg`: one call for all rows of a key head.

Its parameters and shapes are those of experimental/transformer/attention_block_tkg.py, and what it computes is told by its torch
reference. It projects, rotates, attends and projects again, each where it is asked to. Here a step has projected and rotated before,
so the projection that cannot be left out is one by the identity, which changes no bit, and all else is off. The kernel inside of it,
`attention_tkg`, is none that a graph can call: it takes queries and keys from on-chip memory, and objects that only a kernel makes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....step import kv_cache
from ....step.attention import MASKED, DecodeAttention, select_columns
from ....step.attention_rows import AttentionRows
from ....step.features.codes.coded_states import Stored
from ....step.interface import AttentionCall
from .kernel import NKI, NKI_LIBRARY, Choice, Kernel, known
from .node import call_kernel


_LARGEST_HEAD_DIM = 128
# Query heads of all rows that share a key head: those that one tile holds ("batch * sequence_tkg * q_heads <= pmax").
_MOST_QUERIES = 128
# Columns are shared by the cores of a logical one, in whole tiles of 128, from 256 on; so are values of a row.
_TILES, _TILE = 256, 128
_PLAIN = Choice("nkilib.core.utils.common_types", "QuantizationType", "NONE")


def reference(x: Tensor, w_qkv: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """What the kernel computes, with scores as they are.

    Args:
        x: `[rows, 1, hidden]`.
        w_qkv: `[hidden, dim * (heads + 2)]`: queries, the key and the value of a row's own token.
        k_cache, v_cache: `[rows, columns, dim]`, in whose last column the own token stands for what is there.
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


ATTENTION_BLOCK_TKG = known(
    Kernel(
        name="attention_block_tkg",
        module="nkilib.experimental.transformer.attention_block_tkg",
        function="attention_block_tkg",
        packages=(NKI, NKI_LIBRARY),
        operands=("X", "W_qkv", "K_cache", "V_cache", "attention_mask"),
        arguments={
            "X_hidden_dim_actual": None,
            "rmsnorm_X_enabled": False,
            "rmsnorm_X_eps": None,
            "rmsnorm_X_gamma": None,
            "bias_qkv": None,
            "quantization_type_qkv": _PLAIN,
            "weight_dequant_scale_qkv": None,
            "input_dequant_scale_qkv": None,
            "rmsnorm_QK_pre_rope_enabled": False,
            "rmsnorm_QK_pre_rope_eps": 0.0,
            "rmsnorm_QK_pre_rope_W_Q": None,
            "rmsnorm_QK_pre_rope_W_K": None,
            "cos": None,
            "sin": None,
            "rope_contiguous_layout": True,
            "rmsnorm_QK_post_rope_enabled": False,
            "rmsnorm_QK_post_rope_eps": 0.0,
            "rmsnorm_QK_post_rope_W_Q": None,
            "rmsnorm_QK_post_rope_W_K": None,
            "K_cache_transposed": False,
            "active_blocks_table": None,
            "sink": None,
            "softmax_scale": 1.0,
            "update_cache": False,
            "kv_cache_update_idx": None,
            "W_out": None,
            "bias_out": None,
            "quantization_type_out": _PLAIN,
            "weight_dequant_scale_out": None,
            "input_dequant_scale_out": None,
            "transposed_out": False,
            "out_in_sb": False,
        },
        reference=reference,
    )
)


def attend_decodes(otherwise: DecodeAttention) -> DecodeAttention:
    """Attention of decode rows by the kernel, where it computes what a layer does; else by what it stands for."""

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
        if not _fits(call, group, query, key, value):
            return otherwise(call, group, query, keys, values, key, value)
        keys, values = (kv_cache.read(each, None, rows, group.context_length) for each in (keys, values))
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
    """`[rows, heads, dim, 1]`, of `query [rows, heads, dim]` over one key head, whose own tokens' are `key`, `value [rows, dim]`.

    Args:
        visible: `[columns, rows]` uint8.
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


def _fits(call: AttentionCall, group: AttentionRows, query: Tensor, key: Tensor, value: Tensor) -> bool:
    dim, columns = key.shape[-1], group.context_length
    slots = group.blocks is None and group.owned is None  # the kernel reads row i of a cache
    plain = slots and call.softcap is None and call.sinks is None and call.column_bias is None and call.attends_to_all
    alike = dim == value.shape[-1] <= _LARGEST_HEAD_DIM and dim % 2 == 0
    tiles = columns % _TILES == 0 or columns == _TILE
    return plain and alike and tiles and query.shape[0] * query.shape[1] <= _MOST_QUERIES * key.shape[1]
