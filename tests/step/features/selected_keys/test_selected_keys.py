# SPDX-License-Identifier: Apache-2.0
"""Layers that select keys, blocks or pools of them: which are selected, and what is refused."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_models import FEATURES, SELECTED, as_computed, by_few_keys, spec_of
from helpers import artifact_runner, eager_runner, export_tiny, load_model, prefill_pieces, random_tokens, tiny_config
from selecting import make_checkpoint, make_model
from torch import Tensor

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.errors import UnsupportedModelError
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.attention.masks import CausalMask
from optimum_neuron.step.attention.rows import AttentionRows, StepLayout
from optimum_neuron.step.features.selected_keys import slot_index
from optimum_neuron.step.features.selected_keys.index_keys import IndexKeys, IndexScores, ScoresOf, TopKeys
from optimum_neuron.step.features.selected_keys.indexers import set_indexers
from optimum_neuron.step.features.selected_keys.slot_index import select_largest
from optimum_neuron.step.features.selected_keys.state import IndexKeyState
from optimum_neuron.step.ops import DEFAULT_OPS
from optimum_neuron.step.spec import TensorSpec
from optimum_neuron.step.state_specs import state_specs


GROUPED = ("minimax_m3_vl_text", "qwen4_exp_text")
STATES = {
    "glm_moe_dsa": IndexKeyState(0, 16, 8),
    "minimax_m3_vl_text": IndexKeyState(1, 16, 12, 4),
    "qwen4_exp_text": IndexKeyState(1, 16, 15, 4),
}


@pytest.mark.parametrize("kind", GROUPED)
def test_of_equal_scores_the_first_blocks_are_selected(kind: str) -> None:
    equal, theirs = copy.deepcopy(FEATURES[kind].model()), make_model(kind)
    for model in (equal, theirs):
        for name, parameter in model.named_parameters():
            if ".indexer." in name and "norm" not in name:
                parameter.data.zero_()
    text = random_tokens(40, seed=2)
    found = prefill_pieces(eager_runner(equal, tiny_config(), spec=spec_of(kind)), 0, text, [16, 16, 8])
    expected, error = by_few_keys(lambda: theirs, SELECTED[kind], text)
    assert (found - expected[-1]).abs().max() <= error


@pytest.mark.parametrize("kind", STATES)
def test_a_selection_that_leaves_nothing_out_is_left_out(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec, state, model = spec_of(kind), STATES[kind], FEATURES[kind].model()
    assert spec.states_of(IndexKeyState) == (state,)

    def kept(length: int) -> list[str]:
        config = tiny_config(sequence_length=length, context_buckets=None, prefill_chunk_size=2, ctx_batch_size=1)
        return [each.name for each in state_specs(config, spec) if ".index_" in each.name]

    assert kept(state.always) == [] and kept(state.always + 1) == [f"kv_cache.index_{state.layer_idx}"]
    length = min(state.always, 12)
    sizes: dict[str, Any] = {"sequence_length": length, "context_buckets": (length,), "prefill_chunk_size": 4}
    with caplog.at_level(logging.WARNING):
        checkpoint = make_checkpoint(kind, tmp_path / "checkpoint")
        artifact = export_tiny(checkpoint, tmp_path / "artifact", ctx_batch_size=1, **sizes)
    assert f"1 layers of {type(model).__name__}" in caplog.text
    assert f"select {state.always}, and no text has more than {length}" in caplog.text
    assert Artifact.open(artifact).model == spec
    text = random_tokens(length, seed=5)
    expected, error = as_computed(lambda: make_model(kind), text)
    found = prefill_pieces(artifact_runner(artifact), 0, text, [4] * (length // 4))
    assert (found - expected[-1]).abs().max() <= error


def test_an_indexer_is_known_by_what_it_has_not_by_its_name() -> None:
    indexer = FEATURES["qwen4_exp_text"].model().get_submodule("model.layers.1.self_attn.indexer")
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
