# SPDX-License-Identifier: Apache-2.0
"""The step's operators in the form that the Neuron compiler takes: attention in parts, cache writes as one scatter of rows.

A step chooses the largest logit; other graphs draw (lower.py). Attention is written by hand, because the lowering of
scaled_dot_product_attention tests for rows without keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....config import NeuronConfig
from ....step.attention.coded_states import Stored
from ....step.attention.kv_cache import write_tokens
from ....step.ops import StepOps
from ..kernels.moe_tkg import MOE_TKG, compute_chosen
from ..operators.attention import attend_cache, attend_decode
from ..operators.codes import quantized_linear_like
from ..operators.experts import experts_for, in_form
from ..operators.sampler import largest_of_whole
from ..sdk.hardware import chip_of


def write_cache(cache: Stored, states: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Write as `step.attention.kv_cache.write_tokens`: one scatter of `head_dim` values per token and head; codes need another one for scales."""

    def scatter(cache: Tensor, states: Tensor, rows: Tensor, columns: Tensor) -> None:
        _, heads, length, dim = cache.shape
        head = torch.arange(heads, dtype=torch.int32)
        index = (rows[:, None] * heads + head[None, :]) * length + columns[:, None]
        cache.view(-1, dim).index_put_((index.flatten(),), states.reshape(-1, dim))

    write_tokens(cache, states, rows, columns, scatter)


NEURON_OPS = StepOps(
    attend_cache=attend_cache,
    attend_decode=attend_decode,
    write_cache=write_cache,
    quantized_linear=quantized_linear_like(),
    experts=experts_for(chip_of("hlo"), None, in_form),
    sample=largest_of_whole,
)


def ops_for(config: NeuronConfig, ops: StepOps, like: int | None = None) -> StepOps:
    """Return operators with experts as the target's chip computes them in the least time, or by a kernel.

    `like` are tokens of the step with the wanted forms of experts and quantized layers; None: the step itself.
    """
    compute = compute_chosen(in_form) if MOE_TKG.name in config.kernels else in_form
    experts = experts_for(chip_of(config.target), like, compute)
    return replace(ops, experts=experts, quantized_linear=quantized_linear_like(like))
