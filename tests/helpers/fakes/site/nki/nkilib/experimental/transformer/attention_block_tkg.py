# SPDX-License-Identifier: Apache-2.0
"""The signature and the checks of nki-library's attention_block_tkg, as its documentation has them; it computes nothing."""

# ruff: noqa: N803  as the package spells them
from __future__ import annotations

import nki
from nki.language.tensor import NkiTensor

from ...core.utils.common_types import QuantizationType


@nki.jit
def attention_block_tkg(
    X,
    X_hidden_dim_actual,
    rmsnorm_X_enabled,
    rmsnorm_X_eps,
    rmsnorm_X_gamma,
    W_qkv,
    bias_qkv,
    quantization_type_qkv,
    weight_dequant_scale_qkv,
    input_dequant_scale_qkv,
    rmsnorm_QK_pre_rope_enabled,
    rmsnorm_QK_pre_rope_eps,
    rmsnorm_QK_pre_rope_W_Q,
    rmsnorm_QK_pre_rope_W_K,
    cos,
    sin,
    rope_contiguous_layout,
    rmsnorm_QK_post_rope_enabled,
    rmsnorm_QK_post_rope_eps,
    rmsnorm_QK_post_rope_W_Q,
    rmsnorm_QK_post_rope_W_K,
    K_cache_transposed,
    active_blocks_table,
    K_cache,
    V_cache,
    attention_mask,
    sink,
    update_cache,
    kv_cache_update_idx,
    W_out,
    bias_out,
    quantization_type_out,
    weight_dequant_scale_out,
    input_dequant_scale_out,
    transposed_out,
    out_in_sb,
    softmax_scale=None,
    enable_fa_s_prior_tiling=True,
    k_scale=None,
    v_scale=None,
    sbm=None,
    skip_attention=False,
    KVDP=1,
    KVDP_replica_group=None,
):
    off = (
        rmsnorm_X_enabled,
        rmsnorm_QK_pre_rope_enabled,
        rmsnorm_QK_post_rope_enabled,
        K_cache_transposed,
        update_cache,
        transposed_out,
        out_in_sb,
    )
    if any(off) or cos is not None or W_out is not None:
        raise ValueError("the fake knows attention alone")
    if {quantization_type_qkv, quantization_type_out} != {QuantizationType.NONE} or softmax_scale != 1.0:
        raise ValueError("the fake knows plain weights and scores that are scaled")
    rows, tokens, hidden = X.shape
    dim, columns = V_cache.shape[-1], attention_mask.shape[0]
    if hidden % 128 or dim % 2 or dim > 128 or W_qkv.shape[1] % dim:
        raise ValueError(f"H={hidden}, d_head={dim}, I={W_qkv.shape[1]}")
    heads = W_qkv.shape[1] // dim - 2
    if rows * tokens * heads > 128:
        raise ValueError(f"{rows} * {tokens} * {heads} is above 128")
    if columns % 128 or (columns >= 256 and columns % 256):
        raise ValueError(f"{columns} columns are no whole tiles of two cores")
    expected = {
        "W_qkv": (W_qkv, (hidden, dim * (heads + 2))),
        "K_cache": (K_cache, (rows, columns, dim)),
        "V_cache": (V_cache, (rows, columns, dim)),
        "attention_mask": (attention_mask, (columns, rows, heads, tokens)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
    if attention_mask.dtype != "uint8":
        raise ValueError(f"the mask is of {attention_mask.dtype}")
    made = {"output0": (rows, heads, dim, tokens), "output1": (dim, rows, tokens), "output2": (rows, 1, tokens, dim)}
    return tuple(NkiTensor(name, shape, X.dtype, None, X.buffer) for name, shape in made.items())
