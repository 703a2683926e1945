# SPDX-License-Identifier: Apache-2.0
"""The signature and the checks of nki-library's attention_cte, as its documentation has them; it computes nothing."""

from __future__ import annotations

import nki
from nki.language.tensor import NkiTensor


@nki.jit
def attention_cte(
    q,
    k,
    v,
    scale=1.0,
    causal_mask=True,
    k_prior=None,
    v_prior=None,
    prior_used_len=None,
    sink=None,
    sliding_window=None,
    tp_q=True,
    tp_k=False,
    tp_out=False,
    cache_softmax=False,
    softmax_dtype="float32",
    cp_offset=None,
    global_cp_deg=None,
    cp_strided_q_slicing=False,
):
    heads, tokens, dim = q.shape if tp_q else (q.shape[0], q.shape[2], q.shape[1])
    if dim > 128:
        raise ValueError(f"d={dim} is above 128")
    if k_prior is not None and (v_prior is None or prior_used_len is None or scale != 1.0):
        raise ValueError("a prefix needs its values and its length, and scale 1.0")
    kv_heads = k.shape[0]
    columns = v_prior.shape[1]

    def keys(length):
        return (kv_heads, length, dim) if tp_k else (kv_heads, dim, length)

    expected = {
        "k": (k, keys(tokens)),
        "v": (v, (kv_heads, tokens, dim)),
        "k_prior": (k_prior, keys(columns)),
        "v_prior": (v_prior, (kv_heads, columns, dim)),
        "prior_used_len": (prior_used_len, (1,)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
    if heads % kv_heads:
        raise ValueError(f"{heads} heads do not divide by {kv_heads}")
    shape = (heads, dim, tokens) if tp_out else (heads, tokens, dim)
    return NkiTensor("output0", shape, q.dtype, None, q.buffer)
