# SPDX-License-Identifier: Apache-2.0
"""A tiny random model whose layers attend to a window and to compressed keys, with weights by which attention and routing decide."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from sharp import sharpen
from tiny import TINY_SIZES
from transformers import AutoModelForCausalLM, DeepseekV4Config


SELECTED, WINDOW = 3, 6
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
# A window alone, one with some keys for 4 tokens each, and one with all keys for 8.
OPTIONS: dict[str, Any] = TINY_SIZES | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "layer_types": ["sliding_attention", SPARSE, HEAVY],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "compress_rates": {SPARSE: 4, HEAVY: 8},
    "sliding_window": WINDOW,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "o_groups": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": SELECTED,
    "partial_rotary_factor": 0.5,
}


@cache
def reference(rates: tuple[int, int] = (4, 8)) -> Any:
    """transformers' own, in float32, whose attention and routing decide; not to be changed."""
    config = DeepseekV4Config(
        **copy.deepcopy(OPTIONS) | {"compress_rates": dict(zip((SPARSE, HEAVY), rates, strict=True))}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    sharpen(model)
    model.model.layers[0].mlp.gate.tid2eid.random_(4)
    model.set_experts_implementation("eager")
    return model.requires_grad_(False)
