# SPDX-License-Identifier: Apache-2.0
"""A real model's shapes: all graphs of Llama-3.1-8B for eight ranks are lowered and pass the lint."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optimum_neuron.config import NeuronConfig
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import CACHE, COPY_SLOT, PROBE, SAMPLERS, LoweredGraph
from optimum_neuron.targets.neuron.lint.cost import GraphCost, graph_cost
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering.lower_all import lower_all
from optimum_neuron.targets.neuron.lowering.split_tokens import is_split


LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
RANKS = 8
MEMORY = 16e9
STEPS = ("token_generation", "chunked_prefill", "mixed")


def lower_config(folder: Path, layers: int, **options: Any) -> Iterator[LoweredGraph]:
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": layers}))
    sizes = {"batch_size": 32, "sequence_length": 4096, "prefill_chunk_size": 512, "context_buckets": [4096]}
    sizes |= {"dtype": "bfloat16", "tensor_parallel_size": RANKS, "target": "trn2"}
    return lower_all(folder, NeuronConfig.from_dict(sizes | options), {}, trust_remote_code=False)


def check_moved(graph: LoweredGraph, layers: int, most: float) -> tuple[GraphCost, int, int]:
    """Return what a step costs, and the numbers in its weights and in a cache of 32 x 4,096 tokens, which it moves little more than once."""
    cost = graph_cost(graph.name, graph.hlo, graph.io, "trn2")
    matrices = [each.shape for each in graph.io.inputs if each.role == "weight" and each.name.endswith("order_1_0")]
    assert len(matrices) == 1 + 4 * layers  # the head; q, k and v; o; gate and up; down
    weights, cache = sum(math.prod(shape) for shape in matrices), 2 * layers * 32 * 4096 * 128
    assert 1 <= (cost.read + cost.written) / (2 * (weights + cache)) < most
    return cost, weights, cache


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, pytest.param(32, marks=pytest.mark.full)])
def test_the_graphs_of_llama_8b_for_eight_ranks_pass_on_trn1_and_trn2(tmp_path: Path, layers: int) -> None:
    kinds = []
    for graph in lower_config(tmp_path, layers):
        kinds.append(graph.kind)
        for target in ("trn1", "trn2"):
            assert not lint(graph.name, graph.hlo, graph.io, target)
        module = hlo.parse(graph.hlo)
        reduces = [each for _, each in hlo.instructions(module) if each.opcode == "all-reduce"]
        # One per embedding, attention and MLP.
        assert len(reduces) == (1 + 2 * layers if graph.kind in STEPS else 3 if graph.kind == PROBE else 0)
        for each in reduces:
            assert [list(group.replica_ids) for group in each.replica_groups] == [list(range(RANKS))]
        caches = {each.shape for each in graph.io.inputs if each.role == "state" and each.name.startswith(CACHE)}
        assert caches == ({(33, 1, 4096, 128)} if graph.kind in (*STEPS, COPY_SLOT) else set())
        if graph.kind in STEPS:
            shapes = {binding.name: binding.shape for binding in graph.io.inputs if binding.role == "weight"}
            assert shapes["model.lm_head.weight.order_1_0"] == (4096, 128256 // RANKS)
            assert shapes["model.tensor_parallel_rank"] == (1,)
            assert not is_split(graph.hlo)
        if graph.kind == "token_generation":
            cost, weights, cache = check_moved(graph, layers, 1.15)
            # 4 query heads read a key and a value
            assert 1 <= cost.total_flops / (2 * 32 * weights + 2 * 4 * cache) < 1.15
            assert cost.written < 1e6 + 4 * 32 * 128256 / RANKS  # and logits for a sampler
    assert kinds == [*STEPS, *SAMPLERS.values(), COPY_SLOT, PROBE]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < MEMORY


@pytest.mark.slow
def test_a_decode_step_over_blocks_reads_its_weights_and_all_blocks_little_more_than_once(tmp_path: Path) -> None:
    graphs = lower_config(tmp_path, 2, batch_size=128, kv_block_size=128, kv_cache_tokens=32 * 4096)
    graph = next(each for each in graphs if each.kind == "token_generation")
    check_moved(graph, 2, 1.2)
    assert not lint(graph.name, graph.hlo, graph.io, "trn2")
