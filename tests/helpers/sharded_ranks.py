# SPDX-License-Identifier: Apache-2.0
"""Tiny models of many families, and threads that run them as ranks of tensor parallelism."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
from helpers import random_tokens, step_inputs, tiny_config
from safetensors.torch import load_file
from tiny import TINY_SIZES
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from optimum_neuron.artifact.skeleton import assign, empty_model
from optimum_neuron.artifact.weights import named_tensors, rank_weights_name
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.attention.state import KeyValueState
from optimum_neuron.step.features.recurrence.state import RecurrentState
from optimum_neuron.step.interface import ATTENTION_NAME
from optimum_neuron.step.ops import DEFAULT_OPS, StepOps
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.step.step import StepModule
from optimum_neuron.targets.neuron.operators import collectives
from optimum_neuron.targets.neuron.operators.sampler import sample
from optimum_neuron.targets.neuron.sharding import (
    RANK_BUFFER,
    ShardPlan,
    apply_plan,
    shard_plan,
    sharded_ops,
    write_sharded_weights,
)


Result = TypeVar("Result")
_SAMPLINGS = ((0.0, 0.0), (1.0, 0.0), (1.0, 0.1))  # the first is greedy
_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
_HEADS = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_LATENT = _HEADS | {
    "q_lora_rank": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
_RECURRENT = _LAYERS | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "num_experts": 0, "mlp_only_layers": [0, 1],
}  # fmt: skip
_KIMI = {"linear_num_heads": 4, "linear_head_dim": 16, "mlp_layer_types": ["dense", "dense"]}
_NEMOTRON = {
    "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8,
}  # fmt: skip
_STATE_SPACE = {"n_groups": 2, "chunk_size": 16}


def heads(query: int, key_value: int, **sizes: Any) -> dict[str, Any]:
    """Numbers that do not divide: of heads, and of all else that is cut."""
    odd = {"hidden_size": 16 * query, "intermediate_size": 90, "vocab_size": 301}
    return {"num_attention_heads": query, "num_key_value_heads": key_value, **odd, **sizes}


# By name: what a rank has to get right, or the family.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {}),
    "gemma3": ("gemma3_text", {"sliding_window": 8}),
    "gpt_neox": ("gpt_neox", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "llama4": ("llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 96}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "deepseek_v2": ("deepseek_v2", _LATENT),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "head_dim": 8}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 4, "conv_bias": True}),
    "qwen3_next": ("qwen3_next", _RECURRENT),
    "kimi_linear": ("kimi_linear", _LAYERS | _HEADS | _KIMI),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 8, "expand": 2, **_STATE_SPACE}),
    "nemotron_h": ("nemotron_h", _NEMOTRON | _STATE_SPACE),
    "one kv head": ("llama", heads(4, 1)),
    "an idle rank": ("llama", heads(3, 3)),
    "heads of SmolLM2": ("llama", heads(9, 3)),
    "heads of Qwen2-0.5B": ("qwen2", heads(14, 2, tie_word_embeddings=True)),
    "padded tied sinks and experts": ("gpt_oss", heads(6, 3, num_local_experts=4, tie_word_embeddings=True)),
    "padded fused projections": ("phi3", heads(6, 3)),
    "padded norm over all heads": ("olmo2", heads(5, 5)),
    "padded norm per head": ("cohere", heads(6, 3, use_qk_norm=True)),
    "padded latent attention": ("deepseek_v2", heads(6, 6, **_LATENT | {"num_key_value_heads": 6})),
    "bfloat16": ("llama", {"dtype": "bfloat16", "attention_bias": True}),
}


def make_model(name: str) -> PreTrainedModel:
    """A case's model: weights far from their initial values, since norms of ones and biases of zeros hide mistakes."""
    model_type, sizes = CASES[name]
    config_class = type(AutoConfig.for_model(model_type))
    known = {field for base in config_class.__mro__ for field in getattr(base, "__annotations__", {})}
    config = config_class(**{field: value for field, value in TINY_SIZES.items() if field in known} | sizes)
    torch.manual_seed(0)
    dtype = getattr(torch, sizes.get("dtype", "float32"))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape) / 10)
    return model


def run_steps(model: PreTrainedModel, ops: StepOps = DEFAULT_OPS) -> dict[str, Tensor]:
    """The outputs of a prompt in two chunks, a mixed step, and a step of decoding, greedy in slot 0 and sampled in slot 1.

    Rows that the steps leave idle are left out, since nobody reads them.
    """
    spec = inspect_model(model)
    config = tiny_config()
    cache = KVCache(state_specs(config, spec)).to(model.dtype)
    modules = {graph.kind: StepModule(model, cache, graph, ops).eval() for graph in graph_specs(config)}
    tokens = random_tokens(40)
    steps: list[tuple[Any, dict[int, tuple[int, int]], dict[int, tuple[int, Any]]]] = [
        ("chunked_prefill", {}, {0: (0, tokens[:8])}),
        ("chunked_prefill", {}, {0: (8, tokens[8:13])}),
        ("mixed", {0: (13, int(tokens[13]))}, {1: (0, tokens[20:26])}),
        ("token_generation", {0: (14, int(tokens[14])), 1: (6, int(tokens[26]))}, {}),
    ]
    outputs = {
        "kv_heads": torch.tensor([layer.kv_heads for layer in spec.states_of(KeyValueState)]),
        "state_heads": torch.tensor([state.heads for state in spec.states_of(RecurrentState)]),
    }
    for number, (kind, decode, chunks) in enumerate(steps):
        graph = modules[kind].spec
        inputs = step_inputs(graph, decode, chunks)
        for tensor_spec, tensor in zip(graph.inputs(), inputs, strict=True):
            if tensor_spec.name.endswith("sampling_params"):
                tensor[:] = torch.tensor(
                    [[20, 0.9, temperature, min_p] for temperature, min_p in _SAMPLINGS[: len(tensor)]]
                )
            elif tensor_spec.name.endswith("uniforms"):
                tensor.fill_(0.7)
        with torch.no_grad():
            results = modules[kind](*inputs)
        for output, result in zip(graph.outputs(spec.vocab_size), results, strict=True):
            used = len(decode if output.name.startswith("decode") else chunks)
            outputs[f"{number}.{output.name}"] = result[:used].clone()
    return outputs


def write_case(model: PreTrainedModel, world_size: int, folder: Path) -> ShardPlan:
    """What an artifact has for its ranks: config, weights and the names of tied ones."""
    (folder / "weights").mkdir(parents=True)
    model.config.save_pretrained(folder)
    plan = shard_plan(model, world_size)
    tied = write_sharded_weights(named_tensors(model), plan, folder)
    (folder / "tied.json").write_text(json.dumps(tied))
    return plan


def sample_own(model: nn.Module, plan: ShardPlan, logits: Tensor, params: Tensor, uniforms: Tensor) -> Tensor:
    """The sampler over a rank's logits, as a graph of its own has it."""
    tokens: Tensor = sample(logits, params, uniforms, model.get_buffer(RANK_BUFFER), plan.vocab_size, plan.world_size)
    return tokens


# A model is built with its type as the default one of the whole process.
_BUILDING = threading.Lock()


def load_rank(folder: Path, plan: ShardPlan, rank: int, dtype: str) -> tuple[PreTrainedModel, StepOps]:
    """One rank's model and operators, from its own file: no process sees the whole model."""
    with _BUILDING:
        model: Any = empty_model(folder, dtype, trust_remote_code=False)
    apply_plan(model, plan)
    tensors = load_file(folder / rank_weights_name(rank, plan.world_size))
    tied = json.loads((folder / "tied.json").read_text())
    assign(model, tensors | {alias: tensors[stored] for alias, stored in tied.items()})
    # What a target does in a graph of its own, these steps do themselves.
    return model, replace(sharded_ops(DEFAULT_OPS, plan), sample=partial(sample_own, model, plan))


def as_ranks(world_size: int, function: Callable[[int], Result]) -> list[Result]:
    """Run a function once per rank, each in a thread; collectives exchange its tensors."""
    barrier, slots, results = threading.Barrier(world_size), [torch.empty(0)] * world_size, {}

    def exchange(x: Tensor) -> list[Tensor]:
        slots[int(threading.current_thread().name)] = x.clone()
        barrier.wait(60)
        parts = list(slots)
        barrier.wait(60)
        return parts

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        finally:
            if rank not in results:
                barrier.abort()  # the others need not wait

    exchanging = SimpleNamespace(
        is_initialized=lambda: True,
        get_world_size=lambda: world_size,
        all_reduce=lambda x: x.copy_(sum(exchange(x))),
        all_gather=lambda parts, x: [part.copy_(each) for part, each in zip(parts, exchange(x), strict=True)],
    )
    with mock.patch.object(collectives, "distributed", exchanging):
        threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [results[rank] for rank in range(world_size)]
