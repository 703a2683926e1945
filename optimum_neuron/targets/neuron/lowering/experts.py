# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts layers without data-dependent shapes or control flow, through transformers' experts interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS


EXPERTS_NAME = "optimum_neuron_dense"


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Every expert computes every token, and a token takes the experts that it was routed to.

    No weight is gathered per token, and no shape depends on the routing; what it costs is the other experts' arithmetic.

    Args:
        hidden_states: `[tokens, hidden]`.
        top_k_index, top_k_weights: `[tokens, k]`. An index beyond the experts, as expert parallelism marks those of other
            ranks, counts for nothing.
    """
    weights_up = module.gate_up_proj if module.has_gate else module.up_proj
    experts = weights_up.shape[0]
    chosen = top_k_index[:, :, None] == torch.arange(experts, dtype=torch.int32)
    routing = (chosen.to(top_k_weights.dtype) * top_k_weights[:, :, None]).sum(1)  # [tokens, experts]
    up = _linear(module, hidden_states.expand(experts, *hidden_states.shape), weights_up)
    if module.has_bias:
        up = up + (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[:, None]
    # Gating looks at the last dimension alone.
    up = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    down = _linear(module, up, module.down_proj)
    if module.has_bias:
        down = down + module.down_proj_bias[:, None]
    return (down * routing.t()[:, :, None]).sum(0).to(hidden_states.dtype)


def _linear(module: Any, x: Tensor, weight: Tensor) -> Tensor:
    """`[experts, tokens, in]` to `[experts, tokens, out]`."""
    return x @ (weight if module.is_transposed else weight.transpose(1, 2))


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _experts)


def use_static_experts(model: nn.Module) -> None:
    """Makes a transformers model's experts run this way, where it has any and they can be exchanged."""
    if isinstance(model, PreTrainedModel) and model._can_set_experts_implementation():
        model.set_experts_implementation(EXPERTS_NAME)
