# SPDX-License-Identifier: Apache-2.0
"""Layers that select keys, blocks or pools of them: transformers' results, whatever the cut, the neighbors and the slot."""

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
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.attention.masks import CausalMask
from optimum_neuron.step.attention.rows import AttentionRows, StepLayout
from optimum_neuron.step.features.selected_keys import slot_index
from optimum_neuron.step.features.selected_keys.index_keys import IndexKeys, IndexScores, ScoresOf, TopKeys
from optimum_neuron.step.features.selected_keys.indexers import set_indexers
from optimum_neuron.step.features.selected_keys.slot_index import select_largest
from optimum_neuron.step.features.selected_keys.state import IndexKeyState
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.ops import DEFAULT_OPS
from optimum_neuron.step.spec import TensorSpec
from optimum_neuron.step.state_specs import state_specs


# What a token selects: keys; blocks of four for each head with keys, its own among them; pools of four, and what is behind the last.
COUNTS = {
    "deepseek_v32": SELECTED,
    "glm_moe_dsa": SELECTED,
    "hy_v4": SELECTED,
    "minimax_m3_vl_text": 3,
    "qwen4_exp_text": 3,
}
GROUPED = ("minimax_m3_vl_text", "qwen4_exp_text")
STATES = {
    "glm_moe_dsa": IndexKeyState(0, 16, SELECTED),
    "minimax_m3_vl_text": IndexKeyState(1, 16, 12, 4),
    "qwen4_exp_text": IndexKeyState(1, 16, 15, 4),
}
PROMPT = 32
BLOCKS: dict[str, Any] = {"sequence_length": 128, "context_buckets": (128,), "kv_block_size": 64}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_checkpoint(kind, tmp_path_factory.mktemp("selecting") / kind) for kind in COUNTS}


@pytest.fixture(scope="module")
def models(checkpoints: dict[str, Path]) -> dict[str, Any]:
    """With the cached attention, in float32; not to be changed."""
    return {kind: load_model(folder) for kind, folder in checkpoints.items()}


@pytest.fixture(scope="module")
def specs(models: dict[str, Any]) -> dict[str, ModelSpec]:
    return {kind: inspect_model(model) for kind, model in models.items()}


@pytest.fixture(scope="module")
def runners(models: dict[str, Any], specs: dict[str, ModelSpec]) -> dict[str, GraphRunner]:
    return {kind: eager_runner(models[kind], tiny_config(), deterministic=True, spec=specs[kind]) for kind in COUNTS}


def logits_of(model: Any, text: Any, most: int) -> Tensor:
    """By transformers' code, which selects so many, of equal scores the first."""
    with few_keys(model, most), torch.no_grad():
        logits: Tensor = model(torch.from_numpy(text)[None].long(), use_cache=False).logits[0]
    return logits


def is_close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < 2e-5 * expected.abs().max())


def continued(runner: GraphRunner, slot: int, text: Any, length: int, pieces: list[int]) -> Tensor:
    """Logits after a prompt in pieces, and after each token behind it."""
    logits = [prefill_pieces(runner, slot, text[:length], pieces)]
    return torch.stack(logits + [decode_tokens(runner, {slot: int(token)})[1][slot] for token in text[length:]])


@pytest.mark.parametrize("kind", COUNTS)
def test_logits_are_those_of_transformers(
    kind: str, checkpoints: dict[str, Path], models: dict[str, Any], specs: dict[str, ModelSpec]
) -> None:
    runner, model = eager_runner(models[kind], tiny_config(), spec=specs[kind]), reference(checkpoints[kind])
    text = random_tokens(PROMPT + 4, seed=1)
    expected, others = (logits_of(model, text, COUNTS[kind] - less)[PROMPT - 1 :] for less in (0, 1))
    assert is_close(continued(runner, 1, text, PROMPT, [7, 16, 1, 8]), expected)
    assert (others - expected).abs().amax(-1).min() > 1e-3 * expected.abs().max()


@pytest.mark.parametrize("kind", GROUPED)
def test_of_equal_scores_the_first_blocks_are_selected(
    kind: str, checkpoints: dict[str, Path], models: dict[str, Any], specs: dict[str, ModelSpec]
) -> None:
    equal, theirs = copy.deepcopy(models[kind]), reference(checkpoints[kind])
    for model in (equal, theirs):
        for name, parameter in model.named_parameters():
            if ".indexer." in name and "norm" not in name:
                parameter.data.zero_()
    text = random_tokens(26, seed=2)
    found = prefill_pieces(eager_runner(equal, tiny_config(), spec=specs[kind]), 0, text, [16, 10])
    expected, others = (logits_of(theirs, text, COUNTS[kind] - less)[-1] for less in (0, 1))
    assert is_close(found, expected)
    assert (found - others).abs().max() > 1e-3 * expected.abs().max()


@pytest.mark.parametrize(
    "kind", [kind if kind in STATES else pytest.param(kind, marks=pytest.mark.full) for kind in COUNTS]
)
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


@pytest.mark.parametrize("kind", STATES)
def test_who_sees_a_broken_token_is_not_finite_and_nobody_else(kind: str, runners: dict[str, GraphRunner]) -> None:
    runner, layer = runners[kind], STATES[kind].layer_idx
    runner.reset_slots()
    for slot in (0, 1):
        prefill_pieces(runner, slot, random_tokens(20, seed=3), [16, 4])
    for state in ("index", "key", "value"):
        name = f"kv_cache.{state}_{layer}"
        whole = read_state(runner.executable, name)
        whole[1, :, 3] = torch.nan
        whole[0, :, 22:] = torch.nan
        write_state(runner.executable, name, whole)
    logits = decode_tokens(runner, {0: 5, 1: 5})[1]
    assert logits[0].isfinite().all() and logits[1].isnan().all()


def test_a_prefix_that_is_reused_has_its_index_keys(runners: dict[str, GraphRunner]) -> None:
    runner, prompt = runners["glm_moe_dsa"], random_tokens(PROMPT, seed=4)
    runner.reset_slots()
    expected = prefill_pieces(runner, 0, prompt, [16, 8, 8])
    reuse_prefix(runner, 2, 0, 24)
    assert torch.equal(prefill_pieces(runner, 2, prompt[24:], [8]), expected)


@pytest.mark.parametrize("kind", STATES)
def test_a_selection_that_leaves_nothing_out_is_left_out(
    kind: str,
    checkpoints: dict[str, Path],
    specs: dict[str, ModelSpec],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec, state = specs[kind], STATES[kind]
    assert spec.states_of(IndexKeyState) == (state,) and ModelSpec.from_dict(spec.to_dict()) == spec

    def kept(length: int) -> list[str]:
        config = tiny_config(sequence_length=length, context_buckets=None, prefill_chunk_size=2, ctx_batch_size=1)
        return [each.name for each in state_specs(config, spec) if ".index_" in each.name]

    assert kept(state.always) == [] and kept(state.always + 1) == [f"kv_cache.index_{state.layer_idx}"]
    length = min(state.always, 12)
    sizes: dict[str, Any] = {"sequence_length": length, "context_buckets": (length,), "prefill_chunk_size": 4}
    with caplog.at_level(logging.WARNING):
        artifact = export_tiny(checkpoints[kind], tmp_path / "artifact", ctx_batch_size=1, **sizes)
    assert f"1 layers of {type(reference(checkpoints[kind])).__name__}" in caplog.text
    assert f"select {state.always}, and no text has more than {length}" in caplog.text
    assert Artifact.open(artifact).model == spec
    text = random_tokens(length, seed=5)
    expected = logits_of(reference(checkpoints[kind]), text, COUNTS[kind])
    assert is_close(prefill_pieces(artifact_runner(artifact), 0, text, [4] * (length // 4)), expected[-1])


def test_blocks_give_the_bits_of_slots_and_are_refused_where_they_attend_in_place(
    models: dict[str, Any], specs: dict[str, ModelSpec]
) -> None:
    model, spec, slots = models["glm_moe_dsa"], specs["glm_moe_dsa"], BLOCKS | {"kv_block_size": None}
    sizes: dict[str, Any] = {"prefill_chunk_size": 32, "ctx_batch_size": 1}
    plain, blocks = (eager_runner(model, tiny_config(**sizes, **each), spec=spec) for each in (slots, BLOCKS))
    text = random_tokens(91, seed=6)
    blocks.assign_blocks(2, 0, [3])
    blocks.assign_blocks(1, 0, [5, 0])
    for runner in (plain, blocks):
        prefill_pieces(runner, 2, random_tokens(20), [20])
    assert torch.equal(*(continued(runner, 1, text, 90, [32, 32, 26]) for runner in (plain, blocks)))
    model, spec = models["deepseek_v32"], specs["deepseek_v32"]
    check_states(model, spec, tiny_config(output_logits=False, **BLOCKS))
    with pytest.raises(
        ValueError, match="2 layers of DeepseekV32ForCausalLM select 8 keys of up to sequence_length=128, and on"
    ):
        check_states(model, spec, tiny_config(target="hlo", output_logits=False, **BLOCKS))


@pytest.mark.parametrize("kind", GROUPED)
def test_a_selection_of_other_keys_is_found(
    kind: str, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        slot_index, "select_largest", lambda scores, visible, count: select_largest(-scores, visible, count)
    )
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
@pytest.mark.parametrize("kind", [*list(STATES)[:2], pytest.param(GROUPED[1], marks=pytest.mark.full)])
def test_the_cpu_target_selects_the_same(kind: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    artifact = export_tiny(checkpoints[kind], tmp_path / "cpu", target="cpu", mixed_step=False, ctx_batch_size=1)
    runner, text = artifact_runner(artifact), random_tokens(28, seed=7)
    first, second = (
        continued(runner, slot, text, 26, pieces) for slot, pieces in enumerate(([8, 8, 8, 2], [3, 8, 1, 6, 8]))
    )
    assert is_close(first, logits_of(reference(checkpoints[kind]), text, COUNTS[kind])[25:])
    assert torch.equal(first, second)


def expected_selection(scores: Tensor, visible: Tensor, count: int) -> Tensor:
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


def test_what_code_hides_is_not_selected_and_what_it_shows_only_where_a_token_sees_it() -> None:
    cache = KVCache([TensorSpec("kv_cache.index_0", (2, 1, 8, 4), "float32")])
    rows, places = AttentionRows(torch.tensor([[4, 5]]), None, 8), (torch.zeros(2).int(), torch.tensor([4, 5]).int())
    step = StepLayout(cache, [rows], places, places, torch.ones(2) > 0, 1, DEFAULT_OPS)
    keys: Any = IndexKeys.keep(slot_index.SlotIndex(step), 0, torch.ones(1, 1, 2, 4)).transpose(-1, -2)
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
        assert of.mask is not None or of == ScoresOf(hidden=True, width=2, by_head=True)
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


def test_the_code_of_a_layer_computes_with_scores_as_with_tensors() -> None:
    query, keys = torch.ones(1, 3, 2, 4), IndexKeys.keep(_Keys(), 0, torch.ones(1, 3, 4))
    products = torch.matmul(query.float(), keys.transpose(-1, -2).float().unsqueeze(1)) * 0.5
    scores = torch.matmul(torch.ones(1, 3, 1, 2), torch.nn.functional.relu(products)).squeeze(-2)
    assert scores.shape == (1, 3, 5) and scores.dtype == torch.float32
    top = (scores + CausalMask(None)).topk(2, dim=-1).indices.to(torch.int32)
    assert isinstance(top, TopKeys) and top.selected is not None and top.selected.all()


def standing() -> Iterator[tuple[Callable[[Any, Any, Any], object], str]]:
    """What model code might do with index keys, their scores and those of blocks, and the reason for which it is refused."""
    query, mask, pad = torch.ones(1, 3, 2, 4), CausalMask(None), torch.nn.functional.pad
    yield lambda keys, scores, blocks: keys.sum(), "reads .sum of them"
    yield lambda keys, scores, blocks: torch.cat([keys, keys]), "passes them to cat"
    yield lambda keys, scores, blocks: query @ keys.transpose(-1, -2), "multiplies torch.float32"
    yield lambda keys, scores, blocks: query.half() @ keys.transpose(-1, -2).unsqueeze(1), "multiplies torch.float16"
    yield lambda keys, scores, blocks: scores[None].topk(2), "not subscriptable"
    yield lambda keys, scores, blocks: scores.topk(2), "selects keys without a causal mask"
    yield lambda keys, scores, blocks: scores.unsqueeze(0).topk(2), r"selects of \[1, 1, 3, 5\]"
    yield lambda keys, scores, blocks: (scores + mask).topk(2, dim=1), "largest of dimension 1"
    yield lambda keys, scores, blocks: (scores + mask).topk(2, largest=False), "smallest of dimension"
    yield lambda keys, scores, blocks: scores * mask, "and its attention mask to"
    yield lambda keys, scores, blocks: scores.max(-1), "passes them to max"
    yield lambda keys, scores, blocks: (scores + mask).topk(2).indices + 1, "unsupported operand"
    yield lambda keys, scores, blocks: torch.gather(query, 1, (scores + mask).topk(2).indices), "passes them to gather"
    yield (
        lambda keys, scores, blocks: blocks.scatter_(1, torch.zeros(1, 1, 3, 1), 1.0),
        "scatters float over dimension 1",
    )
    yield lambda keys, scores, blocks: blocks.scatter_(-1, query, torch.ones(1, 2, 3, 1)), "scatters Tensor"
    yield lambda keys, scores, blocks: pad(blocks, (0, 1)).topk(2), r"selects of \[1, 2, 3, 4\]"
    yield lambda keys, scores, blocks: blocks.topk(2)[1], "not subscriptable"
    yield lambda keys, scores, blocks: next(iter(blocks.topk(2))) == 0.0, "compares their scores with 0.0"
    yield lambda keys, scores, blocks: next(iter(blocks.topk(2))).sum(), "reads .sum of their scores"
    yield lambda keys, scores, blocks: blocks.topk(2).indices.masked_fill(torch.ones(1), -1), "fills them with -1"


@pytest.mark.parametrize(("use", "reason"), list(standing()))
def test_other_uses_are_refused(use: Callable[[Any, Any, Any], object], reason: str) -> None:
    keys, scores = IndexKeys.keep(_Keys(), 0, torch.ones(1, 3, 4)), IndexScores(torch.ones(1, 3, 5), _Keys())
    with pytest.raises((UnsupportedModelError, TypeError), match=reason):
        use(keys, scores, blocks_of_scores())
