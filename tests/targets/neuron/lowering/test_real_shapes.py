# SPDX-License-Identifier: Apache-2.0
"""A real model's shapes: all graphs of Llama-3.1-8B for eight ranks are lowered, pass the lint, and are certified."""

from __future__ import annotations

import json
import math
import re
import resource
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from optimum_neuron.artifact.artifact import GRAPHS_FOLDER
from optimum_neuron.config import NeuronConfig
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.step.interface import ATTENTION_NAME
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.targets import CompileJob, get_target
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import CACHE, COPY_SLOT, SAMPLERS, LoweredGraph, write_graph
from optimum_neuron.targets.neuron.lint.cost import GraphCost, graph_cost
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lint.rules import RULES
from optimum_neuron.targets.neuron.lowering.lower_all import lower_all
from optimum_neuron.targets.neuron.lowering.split_tokens import is_split
from optimum_neuron.targets.neuron.target import lower_and_check
from optimum_neuron.tools.certify.certify import make_certificate


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
RANKS = 8
MEMORY = 16e9
STEPS = ("token_generation", "chunked_prefill", "mixed")


def most_memory() -> int:
    """The most bytes that this process, or one that it waited for, has had resident."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(each.ru_maxrss for each in usages) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("layers", [4, pytest.param(32, marks=pytest.mark.full)])
def test_the_graphs_of_llama_8b_for_eight_ranks_pass_on_trn1_and_trn2(tmp_path: Path, layers: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": layers}))
    config = eight_ranks("trn2")
    kinds = []
    for graph in lower_all(tmp_path, config, {}, trust_remote_code=False):
        kinds.append(graph.kind)
        for target in ("trn1", "trn2"):
            assert not lint(graph.name, graph.hlo, graph.io, target)
        module = hlo.parse(graph.hlo)
        reduces = [each for _, each in hlo.instructions(module) if each.opcode == "all-reduce"]
        # One per embedding, attention and MLP.
        assert len(reduces) == (1 + 2 * layers if graph.kind in STEPS else 0)
        assert all(
            [list(each.replica_ids) for each in reduce.replica_groups] == [list(range(RANKS))] for reduce in reduces
        )
        weights = {binding.name: binding.shape for binding in graph.io.inputs if binding.role == "weight"}
        if graph.kind in STEPS:
            assert weights["model.lm_head.weight.order_1_0"] == (4096, 128256 // RANKS)
            assert weights["model.tensor_parallel_rank"] == (1,)
        caches = {each.shape for each in graph.io.inputs if each.role == "state" and each.name.startswith(CACHE)}
        assert caches == (set() if graph.kind in SAMPLERS.values() else {(33, 1, 4096, 128)})
        if graph.kind in STEPS:
            assert not is_split(graph.hlo)
        if graph.kind == "token_generation":
            _check_cost(graph, layers)
    assert kinds == [*STEPS, *SAMPLERS.values(), COPY_SLOT]
    assert 0 < most_memory() < MEMORY


@pytest.mark.slow
@pytest.mark.full
def test_the_graphs_of_llama_8b_are_certified_by_their_first_layers(tmp_path: Path) -> None:
    """Two layers have weights, as many as are executed; the graphs that are certified have 32."""
    config, executed = eight_ranks("hlo"), 2
    (tmp_path / "weights").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": executed}))
    model = random_model(tmp_path)
    found = inspect_model(model)
    spec = replace(found, states=tuple(replace(found.states[0], layer_idx=index) for index in range(32)))
    tied = get_target("hlo").write_model(model, config, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": 32}))
    job = CompileJob(tmp_path, config, spec, graph_specs(config), tied, trust_remote_code=False)
    (tmp_path / GRAPHS_FOLDER).mkdir()
    for graph in lower_and_check(tmp_path, config, tied, trust_remote_code=False):
        write_graph(graph, tmp_path / GRAPHS_FOLDER)
    certificate = make_certificate(model, job)
    assert (certificate.layers, certificate.all_layers) == (executed, 32)
    assert {graph.name for graph in job.graphs} < certificate.graphs.keys()
    assert kinds(certificate.graphs) > {graph.kind for graph in job.graphs}
    assert len(certificate.rules) == len(RULES)
    assert 0 < most_memory() < MEMORY


def random_model(folder: Path) -> Any:
    """Of the config of a folder, with weights of one long list of random numbers, again and again: drawing all takes a minute.

    A weight goes on in the list where the one before it ended, and the list is of a prime length: no two weights or rows are equal.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = (0.02 * torch.randn(4_194_301, generator=generator)).to(torch.bfloat16)
    with no_init_weights():
        own = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME).eval()
    place = 0
    for parameter in model.requires_grad_(False).parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        left = parameter.view(-1)
        while len(left):
            piece = numbers[place : place + len(left)]
            left[: len(piece)] = piece
            left, place = left[len(piece) :], (place + len(piece)) % len(numbers)
    return model


def kinds(names: Iterable[str]) -> set[str]:
    """What graphs are without their sizes: those that are executed have fewer columns."""
    return {re.sub(r"_(chunk|context)\d+", "", name) for name in names}


def eight_ranks(target: str) -> NeuronConfig:
    return NeuronConfig(
        batch_size=32,
        sequence_length=4096,
        prefill_chunk_size=512,
        context_buckets=(4096,),
        dtype="bfloat16",
        tensor_parallel_size=RANKS,
        target=target,
    )


@pytest.mark.slow
@pytest.mark.full
def test_eight_ranks_split_the_tokens_of_long_chunks_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": 2}))
    config = NeuronConfig(
        batch_size=8,
        sequence_length=4096,
        prefill_chunk_size=2048,
        prefill_chunk_buckets=(512,),
        context_buckets=(4096,),
        dtype="bfloat16",
        tensor_parallel_size=RANKS,
        target="trn2",
        mixed_step=False,
    )
    found = {}
    for graph in lower_all(tmp_path, config, {}, trust_remote_code=False):
        if graph.kind == "chunked_prefill":
            assert graph.io.spec is not None
            counts = graph_cost(graph.name, graph.hlo, graph.io, "trn2").collectives
            found[graph.io.spec["chunk_size"]] = counts.get("reduce-scatter", 0)
            assert not lint(graph.name, graph.hlo, graph.io, "trn2")
        else:  # of eight decode rows each rank would have one
            assert not is_split(graph.hlo)
    assert found == {512: 0, 2048: 5}


@pytest.mark.slow
def test_a_decode_step_over_blocks_reads_its_weights_and_all_blocks_little_more_than_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": 2}))
    config = replace(eight_ranks("trn2"), batch_size=128, kv_block_size=128, kv_cache_tokens=32 * 4096)
    for graph in lower_all(tmp_path, config, {}, trust_remote_code=False):
        if graph.kind == "token_generation":
            cost, weights, cache = _moved(graph, 2)
            assert 1 <= (cost.read + cost.written) / (2 * (weights + cache)) < 1.2
            assert not lint(graph.name, graph.hlo, graph.io, "trn2")
            return
    pytest.fail("there is no decode graph")


def _moved(graph: LoweredGraph, layers: int) -> tuple[GraphCost, int, int]:
    """What a step costs, and the numbers in its weights and in a cache of 32 x 4,096 tokens."""
    cost = graph_cost(graph.name, graph.hlo, graph.io, "trn2")
    matrices = [each.shape for each in graph.io.inputs if each.role == "weight" and each.name.endswith("order_1_0")]
    assert len(matrices) == 1 + 4 * layers  # the head; q, k and v; o; gate and up; down
    return cost, sum(math.prod(shape) for shape in matrices), 2 * layers * 32 * 4096 * 128


def _check_cost(graph: LoweredGraph, layers: int) -> None:
    """A decode step moves little more than its weights and its cache once, and computes little more than with them."""
    cost, weights, cache = _moved(graph, layers)
    assert 1 <= (cost.read + cost.written) / (2 * (weights + cache)) < 1.15
    assert 1 <= cost.total_flops / (2 * 32 * weights + 2 * 4 * cache) < 1.15  # 4 query heads read a key and a value
    assert cost.written < 1e6 + 4 * 32 * 128256 / RANKS  # and logits for a sampler
