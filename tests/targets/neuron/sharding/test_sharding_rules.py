# SPDX-License-Identifier: Apache-2.0
"""What a rank holds and how tokens are chosen: heads, rules, samplers and files, without processes."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from sharded_ranks import as_ranks, load_rank, make_model, sample_own, write_case
from torch import Tensor, nn

from optimum_neuron.artifact.weights import named_tensors
from optimum_neuron.step.ops import DEFAULT_OPS
from optimum_neuron.step.sampling.sampler import sample
from optimum_neuron.targets.neuron.sharding import (
    RANK_TENSOR,
    ShardPlan,
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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world_size", "query", "key_value"),
    [
        (4, 2, 2, (0, 1, 2, 3), (0, 1)),
        (4, 2, 4, (0, 1, 2, 3), (0, 0, 1, 1)),
        (6, 2, 4, (0, 1, 2, -1, 3, 4, 5, -1), (0, 0, 1, 1)),
        (4, 1, 4, (0, 1, 2, 3), (0, 0, 0, 0)),
        (6, 3, 2, (0, 1, 2, 3, 4, 5, -1, -1), (0, 1, 2, -1)),
    ],
)
def test_heads_are_padded_within_their_group_and_repeated_as_needed(
    heads: int, kv_heads: int, world_size: int, query: tuple[int, ...], key_value: tuple[int, ...]
) -> None:
    layout = head_layout(heads, kv_heads, world_size)
    assert (layout.query, layout.key_value) == (query, key_value)
    with pytest.raises(ValueError, match=f"{heads} query heads are no multiple of {heads + 1} key/value heads"):
        head_layout(heads, heads + 1, world_size)


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


@examples(60)
@given(
    st.integers(0, 1000),
    st.integers(2, 5),
    st.integers(1, 40),
    st.integers(1, 48),
    st.lists(st.integers(0, 39), max_size=6),
    st.floats(0, 1 - 2**-24, width=32),
)
def test_sharded_sampling_chooses_the_tokens_of_the_whole_vocabulary(
    seed: int, world_size: int, vocab: int, top_k: int, tied: list[int], uniform: float
) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed)) * 3 - 50
    logits[0, [index % vocab for index in tied]] = 9.0  # greedy: the lowest of the largest
    params = torch.tensor(
        [[1, 1.0, 0.0, 0.0], [min(5, top_k), 1.0, 0.7, 0.0], [top_k, 0.8, 1.5, 0.05], [0, 1.0, 1.0, 0.0]]
    )
    uniforms = torch.full((4,), uniform)
    plan = ShardPlan("tiny", world_size, vocab, {})
    rule = ShardRule(1, (even(vocab, world_size),))

    def both(rank: int) -> Tensor:
        model = rank_module(rank)
        ops = sharded_ops(DEFAULT_OPS, model, plan)
        local = rule.shard(logits, rank, world_size)
        drawn, largest = sample_own(model, plan, local, params, uniforms), ops.sample(local, params, uniforms)
        assert drawn.dtype == largest.dtype == torch.int32
        return torch.cat([drawn[:, None].float(), largest[:, None].float(), ops.full_logits(local)], dim=1)

    chosen = sample(logits, params, uniforms)
    for found in as_ranks(world_size, both):
        assert found[:, 0].tolist() == chosen.tolist()
        assert found[:, 1].tolist() == logits.argmax(-1).tolist()
        assert torch.equal(found[:, 2:], logits)


@pytest.mark.parametrize(("vocab", "world_size"), [(40, 2), (41, 2), (41, 4), (5, 4)])
def test_sharded_sampling_of_nan_gives_a_token_of_the_vocabulary(vocab: int, world_size: int) -> None:
    logits = torch.randn(6, vocab)
    logits[0], logits[1], logits[2, -1], logits[3, 3:] = torch.nan, -torch.inf, torch.nan, torch.nan
    logits[4] = -torch.nan  # sorts as the smallest where signs count
    plan = ShardPlan("tiny", world_size, vocab, {})
    rule = ShardRule(1, (even(vocab, world_size),))
    for sampled in ([1, 1.0, 0.0, 0.0], [8, 0.9, 0.7, 0.0]):
        params, uniforms = torch.tensor([sampled]).expand(6, -1), torch.full((6,), 0.999)

        def choose(rank: int, params: Tensor = params, uniforms: Tensor = uniforms) -> Tensor:
            return sample_own(rank_module(rank), plan, rule.shard(logits, rank, world_size), params, uniforms)

        first, *others = as_ranks(world_size, choose)
        assert all(torch.equal(first, other) for other in others)
        assert ((first >= 0) & (first < vocab)).all()
        known = [0, 2, 3, 4] + [5] * (sampled[2] == 0)  # minus infinity may lose against a column of padding
        assert torch.equal(first.long()[known], logits.argmax(-1)[known])


def test_a_vocabulary_whose_tokens_float32_cannot_tell_apart_is_refused() -> None:
    with pytest.raises(ValueError, match="its vocabulary of 16777217 exceeds 16777216"):
        sharded_ops(DEFAULT_OPS, nn.Module(), ShardPlan("tiny", 2, 2**24 + 1, {}))


def test_tied_tensors_stay_one_on_a_rank(tmp_path: Path) -> None:
    plan = write_case(make_model("qwen2"), 2, tmp_path)
    model, _ = load_rank(tmp_path, plan, 0, "float32")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (150, 64) and model.lm_head.out_features == 150
    assert "model.lm_head.weight" not in load_file(tmp_path / "weights/tp0.safetensors")


@pytest.mark.parametrize("name", ["llama", "padded tied sinks and experts"])
def test_files_of_ranks_hold_the_shards_and_memory_two_of_them(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").mkdir()
    model = make_model(name)
    plan, tensors, shard = shard_plan(model, 4), named_tensors(model), ShardRule.shard
    made: list[weakref.ref[Tensor]] = []

    def noted(rule: ShardRule, tensor: Tensor, rank: int, ranks: int) -> Tensor:
        assert sum(each() is not None for each in made) <= 1  # the part before is written; those before it are gone
        part = shard(rule, tensor, rank, ranks)
        made.append(weakref.ref(part))
        return part

    with monkeypatch.context() as patch:
        patch.setattr(ShardRule, "shard", noted)
        tied = write_sharded_weights(tensors, plan, tmp_path)
    assert len(made) > 4
    for rank in range(4):
        stored = load_file(tmp_path / f"weights/tp{rank}.safetensors")
        assert stored.pop(RANK_TENSOR).tolist() == [rank]
        assert stored.keys() == tensors.keys() - tied.keys()
        assert all(torch.equal(stored[key], plan.shard(tensors[key], key, rank)) for key in stored)
        assert all(stored[key].shape == plan.local_shape(key) for key in stored)


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
