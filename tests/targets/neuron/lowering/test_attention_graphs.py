# SPDX-License-Identifier: Apache-2.0
"""Attention in lowered graphs: decode steps do not wait for what they write, and scores exist a block at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    ARCHITECTURES,
    CHUNK_SIZE,
    LENGTH,
    eager_runner,
    fill_rows,
    generate,
    load_model,
    prefill_pieces,
    random_tokens,
    tiny_config,
)
from lowered import lower_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.interface import ATTENTION_NAME
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.step.step import StepModule
from optimum_neuron.targets.eager import EagerExecutable
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import CACHE, COPY_SLOT, SAMPLERS, LoweredGraph
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering.lower import lower_step
from optimum_neuron.targets.neuron.lowering.ops import NEURON_OPS
from optimum_neuron.targets.neuron.operators import attention


# What torch-xla has between a scatter and a state's new value; none of it moves a number.
LAYOUT = ("reshape", "transpose")
OTHERS = (COPY_SLOT, *SAMPLERS.values())


def instructions(graph: LoweredGraph) -> dict[int, Any]:
    return {each.id: each for each in hlo.entry(hlo.parse(graph.hlo)).instructions}


def written_states(graph: LoweredGraph) -> list[Any]:
    """The scatters whose results are new states of the cache."""
    by_id = instructions(graph)
    root = by_id[hlo.entry(hlo.parse(graph.hlo)).root_id]
    found = []
    for output, operand in zip(graph.io.outputs, root.operand_ids, strict=True):
        each = by_id[operand]
        while each.opcode in LAYOUT:
            each = by_id[each.operand_ids[0]]
        if output.alias_of is not None and output.alias_of.startswith(CACHE):
            assert each.opcode == "scatter"
            found.append(each)
    return found


def depending(graph: LoweredGraph, sources: list[Any]) -> Iterator[Any]:
    """All instructions that need a result of these, or of those that do; they stand in an order in which they can run."""
    needed = {each.id for each in sources}
    for each in instructions(graph).values():
        if not needed.isdisjoint(each.operand_ids):
            needed.add(each.id)
            yield each


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "llama" else [pytest.mark.full]) for name in ARCHITECTURES]
)
def test_nothing_of_a_decode_step_waits_for_what_it_writes(name: str, tiny_models: dict[str, nn.Module]) -> None:
    graphs = {graph.kind: graph for graph in lower_model(tiny_models[name], tiny_config(target="hlo"))}
    scatters = {kind: written_states(graph) for kind, graph in graphs.items() if kind not in OTHERS}
    decode = graphs["token_generation"]
    assert len(scatters["token_generation"]) == 4
    assert {each.opcode for each in depending(decode, scatters["token_generation"])} <= {*LAYOUT, "tuple"}
    # Chunk rows read what they wrote, scores and values; decode rows beside them do not.
    for kind in ("chunked_prefill", "mixed"):
        dots = [
            each
            for each in depending(graphs[kind], scatters[kind][:2])
            if each.opcode == "dot" and hlo.module_path(each) == "model.model.layers.0.self_attn"
        ]
        assert len(dots) == 2


@pytest.fixture(scope="module")
def wide() -> tuple[nn.Module, ModelSpec]:
    """One layer whose chunks have more scores than fit."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=64,
        max_position_embeddings=8192,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME).eval()
    return model, inspect_model(model)


def lower_wide(wide: tuple[nn.Module, ModelSpec]) -> list[LoweredGraph]:
    model, spec = wide
    sizes = {"sequence_length": 8192, "context_buckets": (8192,), "prefill_chunk_size": 512}
    config = tiny_config(**sizes, ctx_batch_size=2, dtype="bfloat16", target="hlo", mixed_step=False)
    cache = KVCache(state_specs(config, spec))
    return [lower_step(model, cache, each, NEURON_OPS, spec.vocab_size) for each in graph_specs(config)]


def largest_temporary(graph: LoweredGraph) -> int:
    """Bytes, of what attention computes between the states that it is given and those that it leaves."""
    states = {math.prod(each.shape) for each in graph.io.inputs if each.role == "state"}
    return max(
        hlo.byte_count(each.shape)
        for each in instructions(graph).values()
        if "self_attn" in hlo.module_path(each) and math.prod(each.shape.dimensions) not in states
    )


def test_no_temporary_of_attention_exceeds_the_limit(
    wide: tuple[nn.Module, ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    for graph in lower_wide(wide):
        assert largest_temporary(graph) <= attention.SCORES_LIMIT
        assert not lint(graph.name, graph.hlo, graph.io, "trn1")
    monkeypatch.setattr(attention, "SCORES_LIMIT", 1 << 40)
    for graph in lower_wide(wide):
        found = lint(graph.name, graph.hlo, graph.io, "trn1")
        if graph.kind != "token_generation":
            # 2 rows of 512 tokens, 8 heads, 8,192 columns: 256 MiB in float32, half as much in bfloat16
            assert largest_temporary(graph) == 256 << 20
            assert {each.rule for each in found} == {"scores"}
            assert "384.0 MiB of attention scores and weights for 24 MiB" in found[0].problem
        else:
            assert not found


def neuron_runner(model: nn.Module) -> GraphRunner:
    """The step module with the Neuron operators, run by torch."""
    config = tiny_config()
    cache, specs = KVCache(state_specs(config, inspect_model(model))), graph_specs(config)
    steps = {spec.name: StepModule(model, cache, spec, NEURON_OPS).eval() for spec in specs}
    return GraphRunner(EagerExecutable(steps, cache), config, specs)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_change_nothing_beyond_rounding_and_chunk_boundaries_no_bit(
    name: str, sharp_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "COLUMNS", 16)
    monkeypatch.setattr(attention, "SCORES_LIMIT", 4 * 16 * 4 * 8)  # 4 tokens of 2 rows of 4 heads over 16 columns
    assert attention.score_block(8, CHUNK_SIZE, LENGTH) == (4, 16)
    reference = eager_runner(load_model(sharp_checkpoints[name]), tiny_config())
    model = load_model(sharp_checkpoints[name])
    runner = neuron_runner(model)
    prompt = random_tokens(29)
    expected, logits = generate(reference, prompt, 8)
    found, other = generate(runner, prompt, 8)
    assert found == expected and (logits - other).abs().max() < 1e-6
    spec, whole = inspect_model(model), None
    for pieces in ([8, 8, 8, 5], [1] * 29, [3, 16, 1, 9], [7, 8, 8, 6]):
        runner.reset_slots()
        fill_rows(runner, spec, range(4), None)
        last = prefill_pieces(runner, 1, prompt, pieces)
        whole = last if whole is None else whole
        assert torch.equal(last, whole)
