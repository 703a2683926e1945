# SPDX-License-Identifier: Apache-2.0
"""Attention in lowered graphs: in parts that do not wait for what a step writes, with scores a block at a time, or a bias by column."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from biased import BLOCKS, PIECES, SIZES, answers, model_of, same
from helpers import (
    ARCHITECTURES,
    CHUNK_SIZE,
    LENGTH,
    artifact_runner,
    eager_runner,
    examples,
    export_tiny,
    fill_rows,
    generate,
    load_model,
    prefill_pieces,
    random_tokens,
    tiny_config,
)
from hypothesis import given
from hypothesis import strategies as st
from lowered import lower_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.attention.cached_attention import MASKED
from optimum_neuron.step.interface import ATTENTION_NAME
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import CACHE, LoweredGraph
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering import decompositions
from optimum_neuron.targets.neuron.lowering.ops import NEURON_OPS
from optimum_neuron.targets.neuron.operators import attention
from optimum_neuron.targets.neuron.operators.attention import merge_attention_states


# What torch-xla has between a scatter and a state's new value; none of it moves a number.
LAYOUT = ("reshape", "transpose")
STEPS = ("token_generation", "chunked_prefill", "mixed")


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
    lowered = lower_model(tiny_models[name], tiny_config(target="hlo"), STEPS)
    graphs = {graph.kind: graph for graph in lowered}
    scatters = {kind: written_states(graph) for kind, graph in graphs.items()}
    decode = graphs["token_generation"]
    assert len(scatters["token_generation"]) == 4
    assert {each.opcode for each in depending(decode, scatters["token_generation"])} <= {*LAYOUT, "tuple"}
    # Chunk rows read what they wrote, scores and values; decode rows beside them do not.
    for kind in ("chunked_prefill", "mixed"):
        following = [each for each in depending(graphs[kind], scatters[kind][:2]) if each.opcode == "dot"]
        assert [hlo.module_path(each) for each in following].count("model.model.layers.0.self_attn") == 2


def lower_wide(kinds: Sequence[str]) -> list[LoweredGraph]:
    """Graphs of one layer with chunks of more scores than fit."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
        num_hidden_layers=1, vocab_size=64, max_position_embeddings=8192,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME).eval()
    sizes = {"sequence_length": 8192, "context_buckets": (8192,), "prefill_chunk_size": 512}
    return lower_model(model, tiny_config(**sizes, ctx_batch_size=2, dtype="bfloat16", target="hlo"), kinds)


def largest_temporary(graph: LoweredGraph) -> int:
    """Bytes, of what attention computes between the states that it is given and those that it leaves."""
    states = {math.prod(each.shape) for each in graph.io.inputs if each.role == "state"}
    return max(
        hlo.byte_count(each.shape)
        for each in instructions(graph).values()
        if "self_attn" in hlo.module_path(each) and math.prod(each.shape.dimensions) not in states
    )


def test_no_temporary_of_attention_exceeds_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for graph in lower_wide(("token_generation", "chunked_prefill")):
        assert largest_temporary(graph) <= attention.SCORES_LIMIT
        assert not lint(graph.name, graph.hlo, graph.io, "trn1")
    monkeypatch.setattr(attention, "SCORES_LIMIT", 1 << 40)
    (graph,) = lower_wide(("chunked_prefill",))
    found = lint(graph.name, graph.hlo, graph.io, "trn1")
    # 2 rows of 512 tokens, 8 heads, 8,192 columns: 256 MiB in float32, half as much in bfloat16
    assert largest_temporary(graph) == 256 << 20
    assert {each.rule for each in found} == {"scores"}
    assert "384.0 MiB of attention scores and weights for 24 MiB" in found[0].problem


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_change_nothing_beyond_rounding_and_chunk_boundaries_no_bit(
    name: str, sharp_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "COLUMNS", 16)
    monkeypatch.setattr(attention, "SCORES_LIMIT", 4 * 16 * 4 * 8)  # 4 tokens of 2 rows of 4 heads over 16 columns
    assert attention.score_block(8, CHUNK_SIZE, LENGTH) == (4, 16)
    reference = eager_runner(load_model(sharp_checkpoints[name]), tiny_config())
    model = load_model(sharp_checkpoints[name])
    runner = eager_runner(model, tiny_config(), ops=NEURON_OPS)
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


ROWS, HEADS, DIM = 3, 2, 8
DTYPES = [torch.float32, torch.bfloat16]


def attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[rows, heads, dim]` over `[keys, heads, dim]`, in float64; a row that sees nothing is NaN with lse -inf."""
    scores = torch.einsum("rhd,khd->rhk", query.double(), keys.double())
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    return torch.einsum("rhk,khd->rhd", scores.softmax(-1), values.double()), scores.logsumexp(-1)


@examples(60)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2**16), st.sampled_from(DTYPES), st.booleans())
def test_merged_parts_equal_attention_over_all_keys(
    first: int, second: int, seed: int, dtype: torch.dtype, masked: bool
) -> None:
    """A part that saw nothing, exactly or as masks leave it, leaves the other to the bit, whatever it holds."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(ROWS, HEADS, DIM, generator=generator) * 3
    keys, values = (torch.randn(first + second, HEADS, DIM, generator=generator) for _ in range(2))
    visible = torch.rand(ROWS, first + second, generator=generator) < 0.6
    in_first = torch.arange(first + second) < first
    parts = [attend(query, keys, values, visible & part) for part in (in_first, ~in_first)]
    nothing = MASKED if masked else -math.inf
    sides = [(out.to(dtype), lse.float().clamp(min=nothing)) for out, lse in parts]
    out, lse = merge_attention_states(*sides[0], *sides[1])
    expected, expected_lse = attend(query, keys, values, visible)
    seen, apart = visible.any(-1), [(visible & part).any(-1) for part in (in_first, ~in_first)]
    for (own, own_lse), alone in zip(sides, (apart[0] & ~apart[1], apart[1] & ~apart[0]), strict=True):
        assert torch.equal(out[alone], own[alone]) and torch.equal(lse[alone], own_lse[alone])
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert not out[seen].isnan().any() and not lse[seen].isnan().any()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(out[seen].double(), expected[seen], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse[seen].double(), expected_lse[seen], atol=1e-5, rtol=1e-5)
    assert masked or ((out[~seen] == 0).all() and (lse[~seen] == -math.inf).all())


def test_a_side_that_saw_what_is_not_finite_stays_so() -> None:
    out, lse = torch.randn(ROWS, HEADS, DIM), torch.randn(ROWS, HEADS)
    broken = lse.clone()
    broken[1, 0] = math.nan
    for sides in ((out, lse, out, broken), (out, broken, out, lse)):
        joint, joint_lse = merge_attention_states(*sides)
        assert joint[1, 0].isnan().all() and joint_lse[1, 0].isnan()
        assert joint.isnan().sum() == DIM and joint_lse.isnan().sum() == 1


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("bloom", SIZES, id="slots"),
        pytest.param("mpt", BLOCKS, id="blocks", marks=pytest.mark.full),
        pytest.param("falcon", SIZES | {"context_buckets": (64, 192)}, id="buckets", marks=pytest.mark.full),
    ],
)
def test_graphs_are_linted_certified_and_choose_as_eager_steps_do_at_any_cut(
    name: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    model_of(name).save_pretrained(tmp_path / "checkpoint")
    folder = export_tiny(tmp_path / "checkpoint", tmp_path / "hlo", **sizes, target="hlo", certificate=True)
    runner, eager = artifact_runner(folder), eager_runner(model_of(name), tiny_config(**SIZES))
    if sizes is BLOCKS:
        runner.assign_blocks(1, 0, (5, 0, 2))
        runner.assign_blocks(2, 0, (3, 4))
    found, expected = (answers(each, 1, PIECES[0]) for each in (runner, eager))
    for one, other in zip(found, expected, strict=True):
        assert one.argmax() == other.argmax()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    if sizes is not BLOCKS:
        # In the largest graph alone, neither cuts nor slots change a bit.
        alone = GraphRunner(runner.executable, runner.config, list(runner.family), deterministic=True)
        alone.reset_slots()
        found = answers(alone, 1, PIECES[0])
        alone.reset_slots()
        assert same(answers(alone, 0, PIECES[1]), found)


@pytest.mark.parametrize("length", [1, 2, 7, 64, 100])
def test_running_sums_of_whole_numbers_are_torchs(length: int) -> None:
    numbers = torch.randint(-9, 9, (3, length, 2))
    for x in (numbers, numbers.float(), numbers.bool(), numbers.int()):
        for dim in (1, -2):
            found = decompositions.running_sum(x, dim)
            assert found.dtype == x.cumsum(dim).dtype and torch.equal(found, x.cumsum(dim))
    assert decompositions.running_sum(torch.ones(()), 0) == 1
