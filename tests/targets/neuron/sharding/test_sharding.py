# SPDX-License-Identifier: Apache-2.0
"""Ranks hold their parts of a model, each in a file of its own, and compute together what one computes."""

from __future__ import annotations

import copy
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import mixed_spec, python_process, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from sharded_ranks import CASES, as_ranks, load_rank, make_model, run_steps, sample_own, write_case
from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_neuron.artifact.skeleton import empty_model
from optimum_neuron.artifact.weights import named_tensors
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.attention.state import KeyValueState
from optimum_neuron.step.ops import DEFAULT_OPS
from optimum_neuron.step.program import export_graph
from optimum_neuron.step.sampling.sampler import sample
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets.neuron.operators import collectives
from optimum_neuron.targets.neuron.sharding import (
    RANK_TENSOR,
    ShardPlan,
    apply_plan,
    shard_plan,
    sharded_ops,
    tied_names,
    write_sharded_weights,
)
from optimum_neuron.targets.neuron.sharding.plan import (
    PADDING,
    RANK_BUFFER,
    Section,
    ShardRule,
    by_heads,
    even,
    head_layout,
    packed,
)
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
    query = getattr(model.config, "num_attention_heads", None)
    kv_heads = getattr(model.config, "num_key_value_heads", None) or query
    local = query and head_layout(query, kv_heads, world_size).local_key_value
    if model.config.model_type in ("deepseek_v3", "kimi_linear"):
        local = query  # their own plans leave attention whole
    assert set(found["kv_heads"].tolist()) == {local} - {None}
    heads = {each.heads // world_size for each in plan.recurrences.values()}
    assert set(found["state_heads"].tolist()) == heads


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


RANK = """
import sys, torch
from torch import distributed
from optimum_neuron.targets.neuron.operators.collectives import all_gather, all_reduce
rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
x = torch.arange(6.0).view(3, 2).t() + 10 * rank
print([all_reduce(x, 2).tolist(), all_gather(x, 1, 2).tolist(), x.tolist()])
"""


def test_collectives_run_between_processes_and_on_their_ranks_only(tmp_path: Path) -> None:
    processes = [python_process(RANK, str(rank), tmp_path / "meeting") for rank in range(2)]
    parts = [torch.arange(6.0).view(3, 2).t() + 10 * rank for rank in range(2)]
    joint = [sum(parts).tolist(), torch.cat(parts, 1).tolist()]
    for part, process in zip(parts, processes, strict=True):
        output, errors = process.communicate(timeout=120)
        assert json.loads(output or "null") == [*joint, part.tolist()], errors
    for call in (collectives.all_reduce, lambda x, ranks: collectives.all_gather(x, 0, ranks)):
        with pytest.raises(RuntimeError, match=r"runs on 2 ranks together, and this process is one of 1; start"):
            call(torch.ones(2), 2)


@given(st.integers(1, 24), st.integers(1, 16), st.integers(2, 64))
def test_every_query_head_has_one_slot_beside_its_key_value_head(group: int, kv_heads: int, world_size: int) -> None:
    heads = group * kv_heads
    layout = head_layout(heads, kv_heads, world_size)
    assert sorted(head for head in layout.query if head != PADDING) == list(range(heads))
    slots, each = len(layout.key_value), len(layout.query) // len(layout.key_value)
    assert slots % world_size == 0 and len(layout.query) == slots * each
    for slot, head in enumerate(layout.query):
        assert head == PADDING or layout.key_value[slot // each] == head // group
    # The fewest key/value heads per rank that hold all, and of query heads beside them.
    assert layout.local_key_value == -(-kv_heads // world_size)
    assert each == 1 or kv_heads * -(-group // (each - 1)) > slots
    with pytest.raises(ValueError, match=f"{heads} query heads are no multiple of {heads + 1} key/value heads"):
        head_layout(heads, heads + 1, world_size)


@st.composite
def rules(draw: st.DrawFn) -> tuple[tuple[int, ...], ShardRule, int]:
    """Any rule of a plan, with the shape of the whole tensor and the number of ranks."""
    world_size = draw(st.integers(2, 6))
    size = draw(st.integers(1, 24))
    kind = draw(st.sampled_from(["even", "pairs", "packed", "heads", "fused", "first"]))
    kv_heads, group, dim = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    layout = head_layout(kv_heads * group, kv_heads, world_size)
    query, key = kv_heads * group * dim, kv_heads * dim
    sections: dict[str, tuple[Section, ...]] = {
        "even": (even(size, world_size),),
        "pairs": (even(2 * size, world_size, unit=2),),
        "packed": packed(2 * size, 2, world_size),
        "heads": (by_heads(query, kv_heads * group, layout.query),),
        "fused": (
            by_heads(query, kv_heads * group, layout.query),
            by_heads(key, kv_heads, layout.key_value, start=query),
        ),
        "first": (Section(0, size, size, (0, *[PADDING] * (world_size - 1))),),
    }
    chosen = sections[kind]
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    cut = draw(st.integers(0, len(shape) - 1))
    shape[cut] = sum(section.size for section in chosen)
    return tuple(shape), ShardRule(cut, chosen), world_size


def unshard(parts: list[Tensor], rule: ShardRule, shape: tuple[int, ...]) -> Tensor:
    """Put the ranks' parts back where they came from; whatever came from nowhere must be zero."""
    whole = torch.full(shape, -1.0).movedim(rule.dim, 0)
    for rank, part in enumerate(parts):
        for place, piece in zip(rule.places(rank, len(parts)), part.movedim(rule.dim, 0), strict=True):
            if place == PADDING:
                assert not piece.any()
            else:
                whole[place] = piece
    return whole.movedim(0, rule.dim)


@given(rules())
def test_shards_hold_the_whole_tensor_and_zeros(case: tuple[tuple[int, ...], ShardRule, int]) -> None:
    shape, rule, world_size = case
    whole = torch.rand(shape) + 1
    parts = [rule.shard(whole, rank, world_size) for rank in range(world_size)]
    assert {part.shape[rule.dim] for part in parts} == {rule.local_size(world_size)}
    assert torch.equal(unshard(parts, rule, shape), whole)
    for dim in (0, 1):
        part = ShardRule(dim, (even(6, 2),)).shard(whole.new_zeros(6, 6), 1, 2)
        assert part._base is not None  # an even part is a view


def rank_module(rank: int) -> nn.Module:
    """A model that knows its rank."""
    model = nn.Module()
    model.register_buffer(RANK_BUFFER, torch.tensor([rank], dtype=torch.int32))
    return model


@pytest.mark.parametrize(("world_size", "vocab"), [(2, 40), (3, 1), (4, 41), (5, 3)])
def test_ranks_choose_the_tokens_of_the_whole_vocabulary(world_size: int, vocab: int) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)) * 3 - 50
    logits[0, vocab // 2 :] = 9.0  # greedy: the lowest of the largest
    logits[4], logits[5, -1] = torch.nan, torch.inf
    params = torch.tensor([[1, 1.0, 0.0, 0.0], *[[5, 1.0, 0.7, 0.0], [20, 0.8, 1.5, 0.05]] * 2, [0, 1.0, 1.0, 0.0]])
    uniforms = torch.linspace(0, 1 - 2**-24, 6)
    plan, rule = ShardPlan("tiny", world_size, vocab, {}), ShardRule(1, (even(vocab, world_size),))

    def both(rank: int) -> Tensor:
        ops, local = sharded_ops(DEFAULT_OPS, plan), rule.shard(logits, rank, world_size)
        largest, whole = ops.sample(local, params, uniforms), ops.full_logits(local)
        return torch.cat(
            [sample_own(rank_module(rank), plan, local, params, uniforms)[:, None], largest[:, None], whole], dim=1
        )

    for found in as_ranks(world_size, both):
        assert found[:, 0].tolist() == sample(logits, params, uniforms).tolist()
        assert found[:, 1].tolist() == logits.argmax(-1).tolist()
        assert torch.equal(found[:4, 2:], logits[:4]) and found[4, 2:].isnan().all()


def test_a_vocabulary_whose_tokens_float32_cannot_tell_apart_is_refused() -> None:
    with pytest.raises(ValueError, match="its vocabulary of 16777217 exceeds 16777216"):
        sharded_ops(DEFAULT_OPS, ShardPlan("tiny", 2, 2**24 + 1, {}))


def test_files_of_ranks_hold_the_shards_tied_ones_once_and_memory_two_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("padded tied sinks and experts")
    tensors, shard = named_tensors(model), ShardRule.shard
    made: list[weakref.ref[Tensor]] = []

    def noted(rule: ShardRule, tensor: Tensor, rank: int, ranks: int) -> Tensor:
        assert sum(each() is not None for each in made) <= 1  # the part before is written; those before it are gone
        part = shard(rule, tensor, rank, ranks)
        made.append(weakref.ref(part))
        return part

    with monkeypatch.context() as patch:
        patch.setattr(ShardRule, "shard", noted)
        plan = write_case(model, 4, tmp_path)
    assert len(made) > 4
    tied = json.loads((tmp_path / "tied.json").read_text())
    assert tied
    for rank in range(4):
        stored = load_file(tmp_path / f"weights/tp{rank}.safetensors")
        assert stored.pop(RANK_TENSOR).tolist() == [rank]
        assert stored.keys() == tensors.keys() - tied.keys()
        assert all(torch.equal(stored[key], plan.shard(tensors[key], key, rank)) for key in stored)
        assert all(stored[key].shape == plan.local_shape(key) for key in stored)
        loaded, _ = load_rank(tmp_path, plan, rank, "float32")
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight and loaded.lm_head.out_features == 76


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    plan = shard_plan(make_model("llama"), 2)
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \(301, 144\), and the plan is for \(300, 64\)"):
        tensors = named_tensors(make_model("heads of SmolLM2"))
        write_sharded_weights({"model.lm_head.weight": tensors["model.lm_head.weight"]}, plan, tmp_path)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_stored_in_another_type_is_tied_to_nothing(device: str) -> None:
    """It is a copy; with memory or without, the same names are tied."""
    weight, numbers = torch.ones(4, 4, device=device), torch.ones(4, dtype=torch.int64, device=device)
    tensors = {"a": weight, "b": weight[:2], "c": weight[2:], "d": weight.detach(), "e": numbers, "f": numbers}
    assert tied_names(tensors, ShardPlan("tiny", 1, 0, {})) == {"d": "a"}
