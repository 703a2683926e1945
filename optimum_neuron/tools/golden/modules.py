# SPDX-License-Identifier: Apache-2.0
"""The modules: small models with layers of real widths, each in the forms that the compiler may refuse or take long for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


VOCABULARY, LAYERS = 32_768, 2
_ATTENTION = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 8192,
    **_ATTENTION,
}
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
# config.json of each model.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES},
    "gemma3": {"model_type": "gemma3_text", **_SIZES, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_SIZES,
        "head_dim": 64,
        "intermediate_size": 1024,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **_SIZES, **_EXPERTS},
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_SIZES,
        **_EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 512,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **{name: size for name, size in _SIZES.items() if name != "head_dim"},
        "num_key_value_heads": 16,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 512,
        "q_lora_rank": 512,
        "kv_lora_rank": 256,
    },
}


@dataclass(frozen=True)
class GoldenRun:
    """Graphs of one model and one config.

    Attributes:
        name: begins the names of its modules.
        model: a key of MODELS.
        options: fields of NeuronConfig that differ from SIZES.
        modules: what each module shows, by the kind of its graph.
    """

    name: str
    model: str
    modules: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)


SIZES = {
    "batch_size": 8,
    "sequence_length": 2048,
    "prefill_chunk_size": 256,
    "context_buckets": (2048,),
    "dtype": "bfloat16",
}
DECODE, CHUNK, MIXED = "token_generation", "chunked_prefill", "mixed"
RUNS = (
    GoldenRun(
        "dense",
        "llama",
        {
            DECODE: "attention of one token for each row, the scatter of its keys and values",
            CHUNK: "a chunk of a prompt: attention over the cache, a scatter of 256 rows",
            MIXED: "a chunk and decode rows in one graph",
            "sample_decode": "draws without a sort of the vocabulary",
            "copy_slot": "a slot's cache copied onto another",
        },
        {"mixed_step": True},
    ),
    GoldenRun("float32", "llama", {DECODE: "products of float32"}, {"dtype": "float32"}),
    GoldenRun("float16", "llama", {DECODE: "float16, with its own mask value"}, {"dtype": "float16"}),
    GoldenRun(
        "ranks2",
        "llama",
        {
            DECODE: "all-reduce of rows, the token chosen over two ranks",
            "sample_decode": "draws of each rank's rows from the whole vocabulary",
            "probe_collectives": "every kind and width of a collective, tried once at load",
        },
        {"tensor_parallel_size": 2},
    ),
    GoldenRun("ranks4", "llama", {CHUNK: "collectives of a chunk over four ranks"}, {"tensor_parallel_size": 4}),
    GoldenRun(
        "blocks",
        "llama",
        {DECODE: "attention over blocks where they lie, joined by row", CHUNK: "a prompt's blocks, gathered"},
        {"kv_block_size": 128, "kv_cache_tokens": 8192},
    ),
    GoldenRun("int8", "llama", {DECODE: "weights of int8, scaled after the product"}, {"quantization": "int8"}),
    GoldenRun("fp8", "llama", {DECODE: "weights of e4m3"}, {"quantization": "fp8"}),
    GoldenRun("int8_cache", "llama", {DECODE: "keys and values as codes of int8"}, {"kv_cache_dtype": "int8"}),
    GoldenRun("logprobs", "llama", {DECODE: "log-probabilities of the most likely tokens"}, {"top_logprobs": 5}),
    GoldenRun(
        "experts", "qwen3_moe", {DECODE: "experts of few tokens", CHUNK: "experts of many tokens, by blocks of rows"}
    ),
    GoldenRun("sinks", "gpt_oss", {DECODE: "attention with sinks and windows, experts with biases"}),
    GoldenRun("windows", "gemma3", {CHUNK: "sliding windows in every other layer, two rotary tables"}),
    GoldenRun("latent", "deepseek_v3", {DECODE: "latent attention, groups of experts"}),
    GoldenRun(
        "hybrid",
        "qwen3_next",
        {DECODE: "one step of a gated delta rule", CHUNK: "a chunk of a gated delta rule, by blocks"},
    ),
)
SHOWS = {f"{run.name}_{kind}": text for run in RUNS for kind, text in run.modules.items()}
