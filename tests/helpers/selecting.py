# SPDX-License-Identifier: Apache-2.0
"""Tiny random models whose layers attend to the keys that they select, with weights by which attention decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from tiny import TINY_SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from optimum_neuron.step.features.experts.experts import set_experts


SELECTED = 8
# So many heads that scores through their rectifiers are hardly ever equal.
_LATENT: dict[str, Any] = TINY_SIZES | {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": SELECTED,
}
_SHARED = {"indexer_types": ["full", "shared"]}
CONFIGS: dict[str, dict[str, Any]] = {
    # Each layer selects; one layer in two takes what the one before it selected; the same with sinks.
    "deepseek_v32": _LATENT,
    "glm_moe_dsa": _LATENT | _SHARED,
    "hy_v4": _LATENT | _SHARED,
    # Each head with keys selects blocks of them, always its own and two more.
    "minimax_m3_vl_text": TINY_SIZES
    | {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 3,
    },
    # Pools of keys, behind a recurrence, and always the tokens behind the last whole pool.
    "qwen4_exp_text": TINY_SIZES
    | {
        "layer_types": ["linear_attention", "indexed_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "hc_count": 2,
        "hc_lowrank": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 12,
        "indexer_compress_ratio": 4,
    },
}


def make_model(kind: str, **changes: Any) -> Any:
    """Return a model with transformers' own attention and experts, in float32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **CONFIGS[kind] | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("self_attn.q_b_proj.weight"):
            parameter.data *= 20
        if name.endswith("self_attn.q_norm.weight"):
            parameter.data += 3
        if "hyper_connection" in name:  # else streams are alike, and hardly get anything
            torch.nn.init.normal_(parameter.data, std=0.3)
    set_experts(model, "eager")
    return model


def make_checkpoint(kind: str, folder: Path, **changes: Any) -> Path:
    make_model(kind, **changes).save_pretrained(folder)
    return folder


def cut_in_pieces(total: int, most: int) -> st.SearchStrategy[list[int]]:
    def cut(sizes: list[int]) -> list[int]:
        ends = [*np.cumsum(sizes)[np.cumsum(sizes) < total].tolist(), total]
        pieces = np.diff([0, *ends]).tolist()
        return [*pieces[:-1], *[most] * (pieces[-1] // most), *[pieces[-1] % most] * (pieces[-1] % most > 0)]

    return st.lists(st.integers(1, most), min_size=total // 3, max_size=total // 3).map(cut)
