# SPDX-License-Identifier: Apache-2.0
"""Experts of few tokens by nki-library's `moe_tkg`, in its form that reads the weights of chosen experts alone.

Parameters and shapes are those of core/moe/moe_tkg/moe_tkg.py, types of a router's choice those of its tests. There it is no `nki.jit`;
the tests compile it as it is. Here it takes experts without biases, gated by SiLU, in a 16-bit type.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from ....step.features.experts.experts import ExpertsCall
from ..operators.expert_forms import ExpertForm
from ..operators.experts import InForm
from .kernel import EnumMember, Kernel, call_kernel, register


# Tokens of a call, and what hidden sizes are whole tiles of, on each core of a logical one.
_MOST_TOKENS, _TILES = 128, 256
_TYPES = (torch.bfloat16, torch.float16)
_OPERANDS = ("hidden_input", "expert_gate_up_weights", "expert_down_weights", "expert_affinities", "expert_index")
_POST_SCALE = EnumMember("nkilib.core.utils.common_types", "ExpertAffinityScaleMode", "POST_SCALE")


def reference(hidden: Tensor, gate_up: Tensor, down: Tensor, affinities: Tensor, index: Tensor) -> Tensor:
    """Compute what the kernel does, `[tokens, hidden]`: the results of a token's experts, each times its affinity.

    `gate_up` is `[experts, hidden, 2, inner]`, `down [experts, inner, hidden]`, `affinities [tokens, experts]` float32; `index [tokens, k]`
    int32 has the experts of a token, all different.
    """
    tokens, count = index.shape
    chosen = index.flatten()
    up = hidden[:, None].expand(-1, count, -1).flatten(0, 1)[:, None] @ gate_up.flatten(2).index_select(0, chosen)
    gate, values = up.float().chunk(2, dim=-1)
    inner = (nn.functional.silu(gate) * values).to(hidden.dtype)
    outputs = (inner @ down.index_select(0, chosen)).view(tokens, count, -1).float()
    order = torch.arange(affinities.shape[1], dtype=torch.int32, device=index.device)
    weights = torch.where(index[:, :, None] == order, affinities[:, None], 0.0).sum(-1)
    return (outputs * weights[:, :, None]).sum(1).to(hidden.dtype)


MOE_TKG = register(
    Kernel(
        name="moe_tkg",
        module="nkilib.core.moe.moe_tkg.moe_tkg",
        operands=_OPERANDS,
        # Its default multiplies by no affinity; it takes SiLU for gates by default.
        arguments={"is_all_expert": False, "expert_affinities_scaling_mode": _POST_SCALE},
        reference=reference,
    )
)


def compute_chosen(otherwise: InForm) -> InForm:
    """Return experts by the kernel where chosen experts' weights are read and it computes what a layer does, else by `otherwise`."""

    def compute(call: ExpertsCall, form: ExpertForm) -> Tensor:
        if form.kind != "gather" or not _is_supported(call):
            return otherwise(call, form)
        up, down = (each if call.layer.is_transposed else each.transpose(1, 2) for each in (call.up, call.down))
        index = call.index.to(torch.int32)
        nowhere = (index >= call.experts)[:, :1]  # such a token computes its first expert, and is zero
        index = torch.where(nowhere, torch.arange(index.shape[1], dtype=torch.int32), index)
        order = torch.arange(call.experts, dtype=torch.int32)
        affinities = torch.where(index[:, :, None] == order, call.weights[:, :, None].float(), 0.0).sum(1)
        operands = [call.hidden_states.to(up.dtype), up.unflatten(2, (2, -1)), down, affinities, index]
        output = call_kernel(MOE_TKG.name, operands)
        return torch.where(nowhere, 0.0, output).to(call.hidden_states.dtype)

    return compute


def _is_supported(call: ExpertsCall) -> bool:
    layer, (tokens, hidden) = call.layer, call.hidden_states.shape
    if not layer.has_gate or layer.has_bias or not layer.is_concatenated or not isinstance(call.up_weight, Tensor):
        return False
    # The one of transformers' interface; a model may have its own.
    gated = type(layer)._apply_gate.__name__ == "_default_apply_gate"
    silu = isinstance(getattr(layer, "act_fn", None), (nn.SiLU, SiLUActivation))
    plain = gated and silu and not getattr(layer, "has_post_expert_norm", False)
    return plain and call.up.dtype in _TYPES and tokens <= _MOST_TOKENS and hidden % _TILES == 0
