# SPDX-License-Identifier: Apache-2.0
"""Which attention calls the own CPU kernel takes; the others run the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from ...graphs.attention import AttentionRows, attend_cache
from ...graphs.interface import AttentionCall
from ...graphs.masks import AttentionChunk
from .kernels import namespace


HEAD_DIM_STEP, HEAD_DIM_LIMIT = 16, 256
DTYPES = (torch.bfloat16, torch.float32)


def attend_cache_on_cpu(
    call: AttentionCall, group: AttentionRows, query: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """A drop-in for `attend_cache` that reads slots in place and stops at each token's own position."""
    window = call.sliding_window
    if isinstance(window, AttentionChunk) or not is_taken(call, keys, values):
        return attend_cache(call, group, query, keys, values)
    kernel = getattr(torch.ops, namespace()).attend.default
    output: Tensor = kernel(query, keys, values, group.seq_ids, group.position_ids, call.scaling, window or 0)
    return output


def is_taken(call: AttentionCall, keys: Tensor, values: Tensor) -> bool:
    """Whether the kernel takes a call. It reads what its tokens see, and no further."""
    dim = keys.shape[-1]
    plain = (
        not isinstance(call.sliding_window, AttentionChunk)
        and call.softcap is None
        and call.sinks is None
        and values.shape[-1] == dim
    )
    return plain and keys.dtype in DTYPES and dim % HEAD_DIM_STEP == 0 and dim <= HEAD_DIM_LIMIT
