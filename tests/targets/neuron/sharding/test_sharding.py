# SPDX-License-Identifier: Apache-2.0
"""Ranks, each with a file of its own, compute together what one computes; plans without data; rank graphs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import mixed_spec, tiny_config
from sharded_ranks import CASES, as_ranks, load_rank, make_model, run_steps, write_case
from torch import Tensor
from transformers import PreTrainedModel

from optimum_neuron.artifact.skeleton import empty_model
from optimum_neuron.artifact.weights import named_tensors
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.attention.state import KeyValueState
from optimum_neuron.step.program import export_graph
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets.neuron.operators import collectives
from optimum_neuron.targets.neuron.sharding import RANK_TENSOR, apply_plan, shard_plan
from optimum_neuron.targets.neuron.sharding.plan import ShardPlan, head_layout
from optimum_neuron.targets.neuron.sharding.trace import data_free_copy, no_data


Outputs = dict[str, Tensor]
# Ranks add up the same numbers in another order, so they may differ from one rank as far as its own float32 differs from
# float64: at most 1.5 times as far, in all cases and for 2 and 4 ranks. A mistake is a thousand times larger.
NOISE_FACTOR = 3


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: make_model(name) for name in CASES}


def distance(left: Outputs, right: Outputs) -> float:
    """The largest difference between logits."""
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left if "logits" in name)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CASES)
def test_ranks_give_the_logits_and_tokens_of_one(
    models: dict[str, PreTrainedModel], name: str, world_size: int, tmp_path: Path
) -> None:
    model, dtype = models[name], CASES[name][1].get("dtype", "float32")
    plan, expected = write_case(model, world_size, tmp_path), run_steps(model)
    found, *others = as_ranks(world_size, lambda rank: run_steps(*load_rank(tmp_path, plan, rank, dtype)))
    assert all(torch.equal(found[key], other[key]) for other in others for key in found)
    finer = torch.float32 if model.dtype == torch.bfloat16 else torch.float64
    noise = distance(expected, run_steps(copy.deepcopy(model).to(finer)))
    assert 0 < noise < (0.1 if finer == torch.float32 else 1e-5)
    assert distance(expected, found) < NOISE_FACTOR * noise
    assert all(torch.equal(expected[key], found[key]) for key in found if key.endswith("tokens"))
    assert set(found["kv_heads"].tolist()) == key_value_heads(model, world_size)
    heads = {each.heads // world_size for each in plan.recurrences.values()}
    assert set(found["state_heads"].tolist()) == heads


def key_value_heads(model: PreTrainedModel, world_size: int) -> set[int]:
    """Of a rank's layers that attend; the own plans of two models leave attention whole."""
    query = getattr(model.config, "num_attention_heads", 0)
    if model.config.model_type == "mamba2":
        return set()
    if model.config.model_type in ("deepseek_v3", "kimi_linear"):
        return {query}
    layout = head_layout(query, getattr(model.config, "num_key_value_heads", None) or query, world_size)
    return {layout.local_key_value}


@pytest.mark.parametrize("name", ["gpt_oss", "padded norm over all heads"])
def test_a_plan_needs_no_data_and_leaves_the_model_as_it_was(
    models: dict[str, PreTrainedModel], tmp_path: Path, name: str
) -> None:
    models[name].config.save_pretrained(tmp_path)
    empty: Any = empty_model(tmp_path, "float32", trust_remote_code=False)
    shapes = {key: tensor.shape for key, tensor in named_tensors(empty).items()}
    plan = shard_plan(empty, 4)
    assert {key: tensor.shape for key, tensor in named_tensors(empty).items()} == shapes
    assert plan == shard_plan(models[name], 4)
    assert len(set(plan.rules.values())) <= 9  # the same in all layers


def test_every_matrix_is_cut_but_routers_and_what_no_plan_names(models: dict[str, PreTrainedModel]) -> None:
    def whole_matrices(plan: ShardPlan) -> set[str]:
        whole = {name for name in plan.whole if len(plan.shapes[name]) > 1}
        return {name for name in whole if ".layers.0." in name or ".layers." not in name}

    assert whole_matrices(shard_plan(models["llama"], 2)) == set()
    assert whole_matrices(shard_plan(models["gpt_oss"], 2)) == {"model.model.layers.0.mlp.router.weight"}
    assert "model.model.layers.0.self_attn.o_proj.weight" in whole_matrices(shard_plan(models["deepseek_v3"], 2))


def test_a_rank_without_data_is_inspected_and_exported_with_its_collectives(
    models: dict[str, PreTrainedModel], tmp_path: Path
) -> None:
    whole = models["bfloat16"]
    plan = write_case(whole, 2, tmp_path)
    with no_data():
        twin = data_free_copy(whole)
        apply_plan(twin, plan)
        spec = inspect_model(twin)
    assert spec.vocab_size == 150 and [layer.kv_heads for layer in spec.states_of(KeyValueState)] == [1, 1]
    codes = []
    for rank in (0, 1):
        model, ops = load_rank(tmp_path, plan, rank, "bfloat16")
        config = tiny_config()
        cache = KVCache(state_specs(config, spec)).to(torch.bfloat16)
        program = export_graph(model, cache, mixed_spec(config), ops)
        called = [node for node in program.graph.nodes if node.op == "call_function"]
        # The embedding has one summand that is not zero; partial sums are added in the model's type, unless asked for.
        reduced = [node.args[0].meta["val"].dtype for node in called if node.target is collectives.ALL_REDUCE]
        assert reduced == [torch.bfloat16] * (1 + 2 * model.config.num_hidden_layers)
        # Logits of decode rows and of chunk rows; those of the samplers are inside of their nodes.
        assert [node.target for node in called].count(collectives.ALL_GATHER) == 2
        assert RANK_TENSOR in program.graph_signature.inputs_to_buffers.values()
        codes.append(program.graph_module.code)
    assert codes[0] == codes[1]


def test_collectives_run_on_their_ranks_only() -> None:
    for call in (
        lambda: collectives.all_reduce(torch.ones(2), 2),
        lambda: collectives.all_gather(torch.ones(2), 0, 2),
    ):
        with pytest.raises(RuntimeError, match=r"runs on 2 ranks together, and this process is one of 1; start"):
            call()
