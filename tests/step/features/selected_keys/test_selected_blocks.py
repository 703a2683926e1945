# SPDX-License-Identifier: Apache-2.0
"""Layers that select blocks or pools of keys: transformers' results, whatever the cut, the neighbors and the slot."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
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
    tiny_config,
    write_state,
)
from hypothesis import given
from hypothesis import strategies as st
from selecting import cut_in_pieces, logits_in_pieces, make_checkpoint, reference
from torch import Tensor

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.errors import UnsupportedModelError
from optimum_neuron.parity.conditions import few_keys
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.attention.kv_cache import KVCache, write_tokens
from optimum_neuron.step.attention.rows import AttentionRows
from optimum_neuron.step.features.selected_keys import slot_index
from optimum_neuron.step.features.selected_keys.index_keys import IndexKeys, IndexScores, ScoresOf
from optimum_neuron.step.features.selected_keys.indexers import set_indexers
from optimum_neuron.step.features.selected_keys.selection import select_largest
from optimum_neuron.step.features.selected_keys.state import IndexKeyState
from optimum_neuron.step.features.selected_keys.top_keys import TopKeys
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.spec import TensorSpec
from optimum_neuron.step.state_specs import state_specs


# Three blocks of four keys for each head with keys, the token's own among them; three pools of four, and what is behind the last.
KINDS = ("minimax_m3_vl_text", "qwen4_exp_text")
SELECTIONS = {"minimax_m3_vl_text": IndexKeyState(1, 16, 12, 4), "qwen4_exp_text": IndexKeyState(1, 16, 15, 4)}
GROUPS, PROMPT = 3, 26


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_checkpoint(kind, tmp_path_factory.mktemp("blocks") / kind) for kind in KINDS}


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


def logits_of(model: Any, text: Any, most: int) -> Tensor:
    """By transformers' code, which selects so many, of equal scores the first."""
    with few_keys(model, most), torch.no_grad():
        logits: Tensor = model(torch.from_numpy(text)[None].long(), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(
    kind: str, checkpoints: dict[str, Path], models: dict[str, Any], specs: dict[str, ModelSpec]
) -> None:
    runner, model = eager_runner(models[kind], tiny_config(), spec=specs[kind]), reference(checkpoints[kind])
    text = random_tokens(PROMPT + 4, seed=1)
    found = [prefill_pieces(runner, 1, text[:PROMPT], [7, 1, 12, 6])]
    found += [decode_tokens(runner, {1: int(token)})[1][1] for token in text[PROMPT:]]
    expected = logits_of(model, text, GROUPS)
    assert (torch.stack(found) - expected[PROMPT - 1 :]).abs().max() < 2e-5 * expected.abs().max()
    others = logits_of(model, text, GROUPS - 1)
    assert (others - expected)[PROMPT - 1 :].abs().amax(-1).min() > 1e-3 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_scores_the_first_blocks_are_selected(
    kind: str, checkpoints: dict[str, Path], models: dict[str, Any], specs: dict[str, ModelSpec]
) -> None:
    equal, theirs = copy.deepcopy(models[kind]), reference(checkpoints[kind])
    for model in (equal, theirs):
        for name, parameter in model.named_parameters():
            if ".indexer." in name and "norm" not in name:
                parameter.data.zero_()
    text = random_tokens(PROMPT, seed=2)
    found = prefill_pieces(eager_runner(equal, tiny_config(), spec=specs[kind]), 0, text, [16, 10])
    expected = logits_of(theirs, text, GROUPS)
    assert (found - expected[-1]).abs().max() < 2e-5 * expected.abs().max()
    assert (found - logits_of(theirs, text, GROUPS - 1)[-1]).abs().max() > 1e-3 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_no_cut_neighbor_slot_or_old_content_changes_a_bit(
    kind: str, specs: dict[str, ModelSpec], runners: dict[str, GraphRunner]
) -> None:
    runner, spec, prompt = runners[kind], specs[kind], random_tokens(21, seed=2)

    def run(slot: int, pieces: list[int], neighbors: bool) -> list[Tensor]:
        runner.reset_slots()
        if spec.reuses_prefixes:
            fill_rows(runner, spec, range(4), None if neighbors else torch.nan)
        return logits_in_pieces(runner, slot, prompt, pieces, neighbors=neighbors)

    expected = run(0, [16, 5], False)

    @examples(12)
    @given(cut_in_pieces(21, 16), st.integers(0, 2), st.booleans())
    def check(pieces: list[int], slot: int, neighbors: bool) -> None:
        assert all(map(torch.equal, run(slot, pieces, neighbors), expected))

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_who_sees_a_broken_token_is_not_finite_and_nobody_else(kind: str, runners: dict[str, GraphRunner]) -> None:
    runner = runners[kind]
    runner.reset_slots()
    for slot in (0, 1):
        prefill_pieces(runner, slot, random_tokens(20, seed=3), [16, 4])
    for state in ("index", "key", "value"):
        whole = read_state(runner.executable, f"kv_cache.{state}_1")
        whole[1, :, 3] = torch.nan
        whole[0, :, 22:] = torch.nan
        write_state(runner.executable, f"kv_cache.{state}_1", whole)
    logits = decode_tokens(runner, {0: 5, 1: 5})[1]
    assert logits[0].isfinite().all() and logits[1].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_selection_that_leaves_nothing_out_is_left_out(
    kind: str,
    checkpoints: dict[str, Path],
    specs: dict[str, ModelSpec],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec, selection = specs[kind], SELECTIONS[kind]
    assert spec.states_of(IndexKeyState) == (selection,) and ModelSpec.from_dict(spec.to_dict()) == spec

    def kept(length: int) -> list[str]:
        config = tiny_config(sequence_length=length, context_buckets=None, prefill_chunk_size=2, ctx_batch_size=1)
        return [state.name for state in state_specs(config, spec) if ".index_" in state.name]

    assert kept(selection.always) == [] and kept(selection.always + 1) == ["kv_cache.index_1"]
    sizes: dict[str, Any] = {
        "sequence_length": 12,
        "prefill_chunk_size": 8,
        "ctx_batch_size": 1,
        "context_buckets": (12,),
    }
    with caplog.at_level(logging.WARNING):
        artifact = export_tiny(checkpoints[kind], tmp_path / "artifact", **sizes)
    assert "1 layers of" in caplog.text and f"select {selection.always}, and no text has more than 12" in caplog.text
    assert Artifact.open(artifact).model == spec
    text = random_tokens(12, seed=5)
    expected = logits_of(reference(checkpoints[kind]), text, GROUPS)
    found = prefill_pieces(artifact_runner(artifact), 0, text, [8, 4])
    assert (found - expected[-1]).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_a_selection_of_other_keys_is_found(
    kind: str, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def smallest(scores: Tensor, visible: Tensor, count: int) -> Tensor:
        return select_largest(-scores, visible, count)

    monkeypatch.setattr(slot_index, "select_largest", smallest)
    with pytest.raises(ValueError, match=r"otherwise over (15|66) tokens in chunks than at once"):
        inspect_model(models[kind])


def test_an_indexer_is_known_by_what_it_has_not_by_its_name(checkpoints: dict[str, Path]) -> None:
    indexer = load_model(checkpoints["qwen4_exp_text"]).get_submodule("model.layers.1.self_attn.indexer")
    own = getattr(type(indexer).forward, "_without_step", type(indexer).forward)
    for forward, found in ((own, True), (lambda self, hidden_states, mask: None, False)):
        kind = type("Renamed", (type(indexer),), {"forward": forward})
        made = copy.deepcopy(indexer)
        made.__class__ = kind
        set_indexers(made)
        assert hasattr(kind.forward, "_without_step") is found
        del made.token_budget
        kind.forward = own
        set_indexers(made)
        assert kind.forward is own


def test_what_is_convolved_otherwise_beside_is_refused(tmp_path: Path) -> None:
    ngrams: dict[str, Any] = {"ple_layer_ids": [1], "ngram_vocab_size_base": 64, "split_ngram_parts": 1}
    model = load_model(make_checkpoint("qwen4_exp_text", tmp_path, **ngrams))
    with pytest.raises(ValueError, match="it passes what a convolution is to be applied to to pad"):
        inspect_model(model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.full)])
def test_the_cpu_target_selects_the_same(kind: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    artifact = export_tiny(checkpoints[kind], tmp_path / "cpu", target="cpu", mixed_step=False, ctx_batch_size=1)
    runner, text = artifact_runner(artifact), random_tokens(PROMPT + 2, seed=7)
    logits = {}
    for slot, pieces in enumerate(([8, 8, 8, 2], [3, 8, 1, 6, 8])):
        logits[slot] = [prefill_pieces(runner, slot, text[:PROMPT], pieces)]
        logits[slot] += [decode_tokens(runner, {slot: int(token)})[1][slot] for token in text[PROMPT:]]
    expected = logits_of(reference(checkpoints[kind]), text, GROUPS)[PROMPT - 1 :]
    assert (torch.stack(logits[0]) - expected).abs().max() < 2e-5 * expected.abs().max()
    assert torch.equal(torch.stack(logits[0]), torch.stack(logits[1]))


def test_what_code_hides_is_not_selected_and_what_it_shows_only_where_a_token_sees_it() -> None:
    cache = KVCache([TensorSpec("kv_cache.index_0", (2, 1, 8, 4), "float32")])
    rows, slots, columns = AttentionRows(torch.tensor([[4, 5]]), None, 8), torch.zeros(2), torch.tensor([4, 5])
    index = slot_index.SlotIndex(cache, slots.int(), columns.int(), [rows], write_tokens, decodes_apart=False)
    keys: Any = IndexKeys.keep(index, 0, torch.ones(1, 1, 2, 4)).transpose(-1, -2)
    scores: Any = torch.ones(1, 2, 2, 4) @ keys
    hidden = scores.masked_fill(torch.arange(8) < 2, -torch.inf)  # and not what comes later
    selected = hidden.view(1, 2, 2, 4, 2).amax(dim=-1).topk(3, dim=-1).indices.selected
    assert selected.tolist() == [[[False, False, True, True, True, True, False, False]] * 2] * 2


class _Keys:
    """Keys of ones over five columns, and who keeps them; scores are selected from where they are largest."""

    columns = 5

    def keep_index(self, layer_idx: int, keys: Tensor) -> _Keys:
        assert keys.shape == (3, 4)
        return self

    def multiply_query(self, query: Tensor) -> Tensor:
        return query.sum(-1, keepdim=True).expand(*query.shape[:2], 5)

    def select_top(self, scores: Tensor, of: ScoresOf, count: int) -> TopKeys:
        assert scores.shape == (3, 2, 3) and of == ScoresOf(hidden=True, width=2, by_head=True)
        return TopKeys(scores == scores.amax(-1, keepdim=True))


def blocks_of_scores() -> IndexScores:
    keys = IndexKeys.keep(_Keys(), 0, torch.ones(1, 1, 3, 4))
    assert keys.shape == (1, 1, 5, 4)
    scores: Any = torch.ones(1, 2, 3, 4) @ keys.float().transpose(-1, -2)  # type: ignore[operator]
    hidden = scores.masked_fill(torch.arange(5) > torch.arange(3)[:, None], -torch.inf)
    padded: Any = torch.nn.functional.pad(hidden, (0, 1), value=-torch.inf)
    blocks: IndexScores = padded.view(1, 2, 3, 3, 2).amax(dim=-1)
    return blocks


def test_blocks_are_scored_by_head_and_their_places_scattered() -> None:
    blocks: Any = blocks_of_scores()
    assert blocks.scatter_(-1, torch.tensor([[0, 0], [1, 9], [0, 1]]).expand(1, 2, 3, 2), torch.inf) is blocks
    values, indices = blocks.topk(2, dim=-1)
    kept = indices.masked_fill(values == -torch.inf, -1)
    assert kept.selected[:, 0].tolist() == [[True, False, False], [False, True, False], [True, True, False]]


def standing() -> Iterator[tuple[Callable[[Any], object], str]]:
    """What model code might do with scores of blocks, and the reason for which it is refused."""
    yield lambda blocks: blocks.scatter_(1, torch.zeros(1, 1, 3, 1), 1.0), "scatters float over dimension 1"
    yield lambda blocks: blocks.scatter_(-1, torch.zeros(1, 2, 3, 1), torch.ones(1, 2, 3, 1)), "scatters Tensor"
    yield lambda blocks: blocks[None].topk(2), "not subscriptable"
    yield lambda blocks: torch.nn.functional.pad(blocks, (0, 1)).topk(2), r"selects of \[1, 2, 3, 4\]"
    yield lambda blocks: blocks.topk(2)[1], "not subscriptable"
    yield lambda blocks: next(iter(blocks.topk(2))) == 0.0, "compares their scores with 0.0"
    yield lambda blocks: next(iter(blocks.topk(2))).sum(), "reads .sum of their scores"
    yield lambda blocks: blocks.topk(2).indices.masked_fill(torch.ones(1), -1), "fills them with -1"


@pytest.mark.parametrize(("use", "reason"), list(standing()))
def test_other_uses_are_refused(use: Callable[[Any], object], reason: str) -> None:
    with pytest.raises((UnsupportedModelError, TypeError), match=reason):
        use(blocks_of_scores())


def test_scores_of_which_nothing_is_hidden_are_refused() -> None:
    keys = IndexKeys.keep(_Keys(), 0, torch.ones(1, 1, 3, 4))
    scores: Any = torch.ones(1, 2, 3, 4) @ keys.transpose(-1, -2)  # type: ignore[operator]
    with pytest.raises(UnsupportedModelError, match="selects keys without a causal mask"):
        scores.topk(2)
