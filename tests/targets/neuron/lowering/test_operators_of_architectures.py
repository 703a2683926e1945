# SPDX-License-Identifier: Apache-2.0
"""What models of many types lower to: no sort, no top-k, no cumulative sum, no 64-bit type; and no rule of the lint is broken."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from architectures.models import graph_model

from optimum_neuron.config import NeuronConfig
from optimum_neuron.parity.inspect import look_at
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import LoweredGraph
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering.lower import lower_step
from optimum_neuron.targets.neuron.lowering.ops import NEURON_OPS


# With a router of every kind: by groups, of one expert, with biases, interleaved with dense layers; and without experts.
ROUTED = (
    "afmoe", "aria_text", "axk1", "axk2", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "glm4_moe", "glm_moe_dsa", "gpt_oss", "granitemoe", "hy_v4", "lfm2_moe", "llama4_text", "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
DENSE = (
    "apertus", "arcee", "bert", "bert-generation", "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2",
    "cohere_compass_text", "ctrl", "cwm", "diffllama", "electra", "ernie", "ernie4_5", "exaone4", "falcon", "fuyu",
    "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "lfm2", "llama", "mistral", "mpt", "phi3", "qwen2", "qwen3",
)  # fmt: skip
RECURRENT = (
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "mamba", "mamba2", "nemotron_h", "olmo_hybrid",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "zamba2",
)  # fmt: skip
# One of each kind that no other test lowers; the others by the full profile.
KINDS = ("bert", "bloom", "diffllama", "falcon", "gemma3", "glm_moe_dsa", "lfm2_moe")
FORBIDDEN_OPERATORS = {"sort", "topk", "reduce-window", "while", "custom-call", "rng", "rng-bit-generator"}
FORBIDDEN_TYPES = {"float64", "int64", "uint64", "uint32", "complex64", "complex128"}


def mixed_graph(name: str) -> LoweredGraph:
    """The graph of a tiny model in which decode rows and chunk rows meet."""
    config = NeuronConfig(batch_size=2, sequence_length=64, prefill_chunk_size=8, dtype="float32", target="hlo")
    model = graph_model(name, torch.float32)
    spec = look_at(model)
    cache = KVCache(state_specs(config, spec))
    graph = next(graph for graph in graph_specs(config) if graph.kind == "mixed")
    return lower_step(model, cache, graph, NEURON_OPS, spec.vocab_size)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in KINDS else [pytest.mark.full]) for name in (*ROUTED, *DENSE, *RECURRENT)],
)
def test_no_graph_needs_what_compilers_refuse(name: str) -> None:
    graph = mixed_graph(name)
    instructions = [each for _, each in hlo.instructions(hlo.parse(graph.hlo))]
    operators = Counter(each.opcode for each in instructions)
    assert operators["dot"] and operators["scatter"]
    assert not FORBIDDEN_OPERATORS & operators.keys()
    assert not FORBIDDEN_TYPES & {hlo.dtype_name(each.shape) for each in instructions}
    assert not [finding for finding in lint(graph.name, graph.hlo, graph.io, "hlo") if finding.severity == "error"]
