# SPDX-License-Identifier: Apache-2.0
"""The signature and the checks of nki-library's moe_tkg, as its documentation has them; it computes nothing."""

from __future__ import annotations

from nki.language.tensor import NkiTensor

from ...utils.common_types import ExpertAffinityScaleMode


def moe_tkg(
    hidden_input,
    expert_gate_up_weights,
    expert_down_weights,
    expert_affinities,
    expert_index,
    is_all_expert,
    rank_id=None,
    expert_gate_up_bias=None,
    expert_down_bias=None,
    expert_gate_up_weights_scale=None,
    expert_down_weights_scale=None,
    hidden_input_scale=None,
    gate_up_input_scale=None,
    down_input_scale=None,
    mask_unselected_experts=False,
    expert_affinities_eager=None,
    expert_affinities_scaling_mode=ExpertAffinityScaleMode.NO_SCALE,
    activation_fn="SiLU",
    output_dtype=None,
    gate_clamp_upper_limit=None,
    gate_clamp_lower_limit=None,
    up_clamp_upper_limit=None,
    up_clamp_lower_limit=None,
    output_in_sbuf=False,
    is_all_expert_dynamic=False,
    block_size=None,
):
    if is_all_expert or expert_affinities_scaling_mode is not ExpertAffinityScaleMode.POST_SCALE:
        raise ValueError("the fake knows chosen experts alone, scaled by their affinities")
    tokens, hidden = hidden_input.shape
    experts, _, _, inner = expert_gate_up_weights.shape
    if tokens > 128 or hidden % 128:
        raise ValueError(f"T={tokens}, H={hidden}")
    expected = {
        "gate_up": (expert_gate_up_weights, (experts, hidden, 2, inner), hidden_input.dtype),
        "down": (expert_down_weights, (experts, inner, hidden), hidden_input.dtype),
        "affinities": (expert_affinities, (tokens, experts), "float32"),
        "index": (expert_index, (tokens, expert_index.shape[1]), "int32"),
    }
    for name, (tensor, shape, dtype) in expected.items():
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            raise ValueError(f"{name} is {tensor.dtype}{tuple(tensor.shape)}, not {dtype}{shape}")
    if hidden_input.dtype not in ("bfloat16", "float16"):
        raise ValueError(f"{hidden_input.dtype} is not supported")
    return NkiTensor("output0", (tokens, hidden), hidden_input.dtype, None, hidden_input.buffer)
