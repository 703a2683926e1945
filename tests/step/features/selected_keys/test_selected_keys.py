# SPDX-License-Identifier: Apache-2.0
"""Layers that attend to the keys that they select: transformers' results, whatever the cut, the neighbors and the slot."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    LENGTH,
    artifact_runner,
    decode_tokens,
    eager_runner,
    examples,
    export_tiny,
    fill_rows,
    load_model,
    prefill_pieces,
    random_tokens,
    read_state,
    reuse_prefix,
    tiny_config,
    write_state,
)
from hypothesis import given
from hypothesis import strategies as st
from selecting import SELECTED, cut_in_pieces, logits_in_pieces, make_checkpoint, reference
from torch import Tensor

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.errors import UnsupportedModelError
from optimum_neuron.parity.conditions import few_keys
from optimum_neuron.parity.inspect import check_states, inspect_model
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.attention.masks import CausalMask
from optimum_neuron.step.features.selected_keys.index_keys import IndexKeys, IndexScores, ScoresOf
from optimum_neuron.step.features.selected_keys.selection import select_largest
from optimum_neuron.step.features.selected_keys.state import IndexKeyState
from optimum_neuron.step.features.selected_keys.top_keys import TopKeys
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.state_specs import state_specs


KINDS = ("deepseek_v32", "glm_moe_dsa", "hy_v4")
PROMPT = 32


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_checkpoint(kind, tmp_path_factory.mktemp("indexed") / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def models(checkpoints: dict[str, Path]) -> dict[str, Any]:
    """With the cached attention, in float32; not to be changed."""
    return {kind: load_model(folder) for kind, folder in checkpoints.items()}


@pytest.fixture(scope="module")
def specs(models: dict[str, Any]) -> dict[str, ModelSpec]:
    return {kind: inspect_model(model) for kind, model in models.items()}


@pytest.fixture(scope="module")
def runners(models: dict[str, Any], specs: dict[str, ModelSpec]) -> dict[str, GraphRunner]:
    """Every step in one graph."""
    return {kind: eager_runner(models[kind], tiny_config(), deterministic=True, spec=specs[kind]) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_those_of_transformers(
    kind: str, checkpoints: dict[str, Path], models: dict[str, Any], specs: dict[str, ModelSpec]
) -> None:
    runner, model = eager_runner(models[kind], tiny_config(), spec=specs[kind]), reference(checkpoints[kind])
    text = random_tokens(PROMPT + 4, seed=1)
    found = [prefill_pieces(runner, 1, text[:PROMPT], [7, 16, 1, 8])]
    found += [decode_tokens(runner, {1: int(token)})[1][1] for token in text[PROMPT:]]
    with few_keys(model, SELECTED):  # of equal scores the first
        expected = model(torch.from_numpy(text)[None].long()).logits[0]
    assert (torch.stack(found) - expected[PROMPT - 1 :]).abs().max() < 2e-5 * expected.abs().max()
    with few_keys(model, SELECTED - 1):
        others = model(torch.from_numpy(text)[None].long()).logits[0]
    assert (others - expected)[PROMPT - 1 :].abs().amax(-1).min() > 1e-3 * expected.abs().max()


@pytest.mark.parametrize("kind", ["glm_moe_dsa", *(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[::2])])
def test_no_cut_neighbor_slot_or_old_content_changes_a_bit(
    kind: str, specs: dict[str, ModelSpec], runners: dict[str, GraphRunner]
) -> None:
    runner, spec, prompt = runners[kind], specs[kind], random_tokens(18, seed=2)

    def run(slot: int, pieces: list[int], neighbors: bool) -> list[Tensor]:
        runner.reset_slots()
        fill_rows(runner, spec, range(4), None if neighbors else 0.0)
        return logits_in_pieces(runner, slot, prompt, pieces, neighbors=neighbors)

    expected = run(0, [16, 2], False)

    @examples(20)
    @given(cut_in_pieces(18, 16), st.integers(0, 2), st.booleans())
    def check(pieces: list[int], slot: int, neighbors: bool) -> None:
        assert all(map(torch.equal, run(slot, pieces, neighbors), expected))

    check()


def test_who_sees_a_broken_token_is_not_finite_and_nobody_else(runners: dict[str, GraphRunner]) -> None:
    runner = runners["deepseek_v32"]
    runner.reset_slots()
    for slot in (0, 1):
        prefill_pieces(runner, slot, random_tokens(20, seed=3), [16, 4])
    name = "kv_cache.index_0"
    index = read_state(runner.executable, name)
    assert index.shape == (4, 1, LENGTH, 16)
    write_state(
        runner.executable,
        name,
        index.index_fill(2, torch.tensor([3]), torch.nan) * (torch.arange(4) == 1).view(4, 1, 1, 1),
    )
    for state in ("key", "value"):
        whole = read_state(runner.executable, f"kv_cache.{state}_0")
        whole[1, :, 3] = torch.nan
        write_state(runner.executable, f"kv_cache.{state}_0", whole)
    logits = decode_tokens(runner, {0: 5, 1: 5})[1]
    assert logits[0].isfinite().all() and logits[1].isnan().all()


def test_a_prefix_that_is_reused_has_its_index_keys(runners: dict[str, GraphRunner]) -> None:
    runner, prompt = runners["glm_moe_dsa"], random_tokens(PROMPT, seed=4)
    runner.reset_slots()
    expected = prefill_pieces(runner, 0, prompt, [16, 8, 8])
    reuse_prefix(runner, 2, 0, 24)
    assert torch.equal(prefill_pieces(runner, 2, prompt[24:], [8]), expected)


@pytest.mark.parametrize("kind", ["glm_moe_dsa", *(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[::2])])
def test_a_selection_that_leaves_nothing_out_is_left_out(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(kind, tmp_path / "checkpoint", index_topk=LENGTH)
    with caplog.at_level(logging.WARNING):
        artifact = Artifact.open(export_tiny(folder, tmp_path / "artifact"))
    layers = 2 if kind == "deepseek_v32" else 1
    assert f"{layers} layers of" in caplog.text and "select 64, and no text has more than 64 tokens" in caplog.text
    assert [each.always for each in artifact.model.states_of(IndexKeyState)] == [LENGTH] * layers
    assert not [state for state in state_specs(artifact.config, artifact.model) if ".index_" in state.name]
    model, ids = load_model(folder), random_tokens(PROMPT, seed=5)
    logits = prefill_pieces(eager_runner(model, tiny_config(), spec=artifact.model), 0, ids, [16, 16])
    redrawn = copy.deepcopy(model)
    for name, parameter in redrawn.named_parameters():
        if ".indexer." in name:
            torch.nn.init.normal_(parameter.data)
    runner = eager_runner(redrawn, tiny_config(), spec=artifact.model)
    assert torch.equal(prefill_pieces(runner, 0, ids, [16, 16]), logits)


def test_one_token_more_than_is_always_attended_to_needs_index_keys(specs: dict[str, ModelSpec]) -> None:
    spec = specs["glm_moe_dsa"]
    assert spec.states_of(IndexKeyState) == (IndexKeyState(0, 16, SELECTED),) and spec.reuses_prefixes
    assert ModelSpec.from_dict(spec.to_dict()) == spec

    def kept(length: int) -> list[str]:
        config = tiny_config(sequence_length=length, context_buckets=None, prefill_chunk_size=2, ctx_batch_size=1)
        return [state.name for state in state_specs(config, spec) if ".index_" in state.name]

    assert kept(SELECTED) == [] and kept(SELECTED + 1) == ["kv_cache.index_0"]


def test_blocks_that_attend_in_place_are_refused(models: dict[str, Any], specs: dict[str, ModelSpec]) -> None:
    sizes: dict[str, Any] = {
        "kv_block_size": 64,
        "sequence_length": 128,
        "context_buckets": (128,),
        "output_logits": False,
    }
    model, spec = models["deepseek_v32"], specs["deepseek_v32"]
    check_states(model, spec, tiny_config(**sizes))
    with pytest.raises(
        ValueError, match="2 layers of DeepseekV32ForCausalLM select 8 keys of up to sequence_length=128, and on"
    ):
        check_states(model, spec, tiny_config(target="hlo", **sizes))


def test_blocks_give_the_bits_of_slots(models: dict[str, Any], specs: dict[str, ModelSpec]) -> None:
    sizes: dict[str, Any] = {
        "sequence_length": 128,
        "context_buckets": (128,),
        "prefill_chunk_size": 32,
        "ctx_batch_size": 1,
    }
    model, spec = models["glm_moe_dsa"], specs["glm_moe_dsa"]
    slots, blocks = (
        eager_runner(model, tiny_config(**sizes, **paged), spec=spec) for paged in ({}, {"kv_block_size": 64})
    )
    text = random_tokens(90, seed=6)
    blocks.assign_blocks(2, 0, [3])
    blocks.assign_blocks(1, 0, [5, 0])
    for runner in (slots, blocks):
        prefill_pieces(runner, 2, random_tokens(20), [20])
    pieces = [32, 32, 26]
    assert torch.equal(prefill_pieces(slots, 1, text, pieces), prefill_pieces(blocks, 1, text, pieces))
    assert torch.equal(decode_tokens(slots, {1: 7})[1][1], decode_tokens(blocks, {1: 7})[1][1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["glm_moe_dsa"])
def test_the_cpu_target_selects_the_same(kind: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    runner = artifact_runner(export_tiny(checkpoints[kind], tmp_path / "cpu", target="cpu", mixed_step=False))
    model, text, length = reference(checkpoints[kind]), random_tokens(20, seed=7), 18
    logits = {}
    for slot, pieces in enumerate(([16, 2], [3, 13, 2], [1, 1, 8, 7, 1])):
        logits[slot] = [prefill_pieces(runner, slot, text[:length], pieces)]
        logits[slot] += [decode_tokens(runner, {slot: int(token)})[1][slot] for token in text[length:]]
    with few_keys(model, SELECTED), torch.no_grad():
        expected = model(torch.from_numpy(text)[None].long()).logits[0, length - 1 :]
    assert (torch.stack(logits[0]) - expected).abs().max() < 2e-5 * expected.abs().max()
    assert all(torch.equal(torch.stack(logits[0]), torch.stack(logits[slot])) for slot in (1, 2))


def expected_selection(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Row by row: the visible columns, sorted."""
    found = torch.zeros_like(visible)
    for row, own in enumerate(torch.where(scores.isnan(), torch.inf, scores).tolist()):
        seen = visible[row].nonzero().flatten().tolist()
        found[row, sorted(seen, key=lambda column: (-own[column], column))[:count]] = True
    return found


@pytest.mark.parametrize("columns", [1, 5, 64, 300])
@pytest.mark.parametrize("count", [1, 3, 64])
def test_the_largest_visible_scores_are_selected_the_lowest_columns_of_equal_ones(columns: int, count: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    scores = torch.randn(40, columns, generator=generator)
    scores[:10] = scores[:10].round()  # many that are equal
    scores[10:12] = 0.0
    scores[12, ::2], scores[13, ::3], scores[14, ::2], scores[15] = torch.inf, -torch.inf, torch.nan, -0.0
    scores[16:20] *= 1e-42
    scores[20:24] *= 1e38
    visible = torch.rand(40, columns, generator=generator) < torch.linspace(0, 1, 40)[:, None]
    found = select_largest(scores, visible, count)
    assert torch.equal(found, expected_selection(scores, visible, count))
    unseen = torch.where(visible, scores, torch.nan)
    assert torch.equal(select_largest(unseen, visible, count), found)


class _Keys:
    """Keys of ones over five columns, of which whoever asks gets all; and who keeps them."""

    columns = 5

    def keep_index(self, layer_idx: int, keys: Tensor) -> _Keys:
        assert keys.shape == (3, 4)
        return self

    def multiply_query(self, query: Tensor) -> Tensor:
        return query.sum(-1, keepdim=True).expand(*query.shape[:2], 5)

    def select_top(self, scores: Tensor, of: ScoresOf, count: int) -> TopKeys:
        return TopKeys(scores > 0)


def standing() -> Iterator[tuple[Callable[[Any, Any], object], str]]:
    """What model code might do with index keys and their scores, and the reason for which it is refused."""
    query = torch.ones(1, 3, 2, 4)
    yield lambda keys, scores: keys.sum(), "reads .sum of them"
    yield lambda keys, scores: torch.cat([keys, keys]), "passes them to cat"
    yield lambda keys, scores: query @ keys.transpose(-1, -2), "multiplies torch.float32"
    yield lambda keys, scores: query.half() @ keys.transpose(-1, -2).unsqueeze(1), "multiplies torch.float16"
    yield lambda keys, scores: scores[None].topk(2), "not subscriptable"
    yield lambda keys, scores: scores.unsqueeze(0).topk(2), r"selects of \[1, 1, 3, 5\]"
    yield lambda keys, scores: (scores + CausalMask(None)).topk(2, dim=1), "largest of dimension 1"
    yield lambda keys, scores: (scores + CausalMask(None)).topk(2, largest=False), "smallest of dimension"
    yield lambda keys, scores: scores * CausalMask(None), "and its attention mask to"
    yield lambda keys, scores: scores.max(-1), "passes them to max"
    yield lambda keys, scores: (scores + CausalMask(None)).topk(2).indices + 1, "unsupported operand"
    yield (
        lambda keys, scores: torch.gather(query, 1, (scores + CausalMask(None)).topk(2).indices),
        "passes them to gather",
    )


@pytest.mark.parametrize(("use", "reason"), list(standing()))
def test_other_uses_are_refused(use: Callable[[Any, Any], object], reason: str) -> None:
    keys = IndexKeys.keep(_Keys(), 0, torch.ones(1, 3, 4))
    scores = IndexScores(torch.ones(1, 3, 5), _Keys())
    with pytest.raises((UnsupportedModelError, TypeError), match=reason):
        use(keys, scores)


def test_the_code_of_a_layer_computes_with_scores_as_with_tensors() -> None:
    query, keys = torch.ones(1, 3, 2, 4), IndexKeys.keep(_Keys(), 0, torch.ones(1, 3, 4))
    products = torch.matmul(query.float(), keys.transpose(-1, -2).float().unsqueeze(1)) * 0.5
    scores = torch.matmul(torch.ones(1, 3, 1, 2), torch.nn.functional.relu(products)).squeeze(-2)
    assert scores.shape == (1, 3, 5) and scores.dtype == torch.float32
    top = (scores + CausalMask(None)).topk(2, dim=-1).indices.to(torch.int32)
    assert isinstance(top, TopKeys) and top.selected is not None and top.selected.all()
