# SPDX-License-Identifier: Apache-2.0
"""Layers that attend to a window and to compressed keys: transformers' results, whatever the cut, the neighbors and the slot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressing import SELECTED, cached, reference
from helpers import (
    artifact_runner,
    as_tensor,
    decode_rows,
    decode_tokens,
    eager_runner,
    examples,
    export_tiny,
    fill_rows,
    prefill_pieces,
    random_tokens,
    read_state,
    reuse_prefix,
    tiny_config,
    write_state,
)
from hypothesis import given
from hypothesis import strategies as st
from selecting import cut_in_pieces
from torch import Tensor

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.core import PromptPiece
from optimum_neuron.errors import UnsupportedModelError
from optimum_neuron.parity.conditions import few_keys
from optimum_neuron.parity.inspect import check_states, inspect_model, look_at
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.attention import rows as attention_rows
from optimum_neuron.step.attention.call import CompressedKeys
from optimum_neuron.step.attention.masks import CausalMask
from optimum_neuron.step.features.compressed_keys.compression import (
    CompressingLayers,
    GroupKeys,
    GroupWindows,
    split_joined,
)
from optimum_neuron.step.features.compressed_keys.slot_groups import SlotGroupKeys
from optimum_neuron.step.features.compressed_keys.state import CompressedKeyState
from optimum_neuron.step.features.selected_keys.index_keys import ScoresOf
from optimum_neuron.step.features.selected_keys.state import IndexKeyState
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets.neuron.sharding import shard_plan


PROMPT = 40
# Rows shorter than a group, of which a prompt fills several in a step.
SHORT_ROWS: dict[str, Any] = {"prefill_chunk_size": 3, "ctx_batch_size": 3}


@cache
def runner(rates: tuple[int, int] = (4, 8), deterministic: bool = False, **changes: Any) -> GraphRunner:
    return eager_runner(cached(rates), tiny_config(**changes), deterministic=deterministic)


@cache
def spec() -> ModelSpec:
    return inspect_model(cached())


def own_logits(text: np.ndarray, rates: tuple[int, int] = (4, 8), most: int = SELECTED) -> Tensor:
    with few_keys(reference(rates), most):
        logits: Tensor = reference(rates)(torch.from_numpy(text)[None].long(), use_cache=False).logits[0]
    return logits


def continued(steps: GraphRunner, slot: int, tokens: np.ndarray) -> Tensor:
    return torch.stack([decode_tokens(steps, {slot: int(token)})[1][slot] for token in tokens])


def is_close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < 3e-5 * expected.abs().max())


@pytest.mark.parametrize("sizes", [{}, SHORT_ROWS], ids=["long rows", "short rows"])
def test_logits_are_those_of_transformers(sizes: dict[str, Any]) -> None:
    steps, text = runner(**sizes), random_tokens(PROMPT + 9, seed=1)
    steps.reset_slots()
    found = torch.stack(
        [prefill_pieces(steps, 1, text[:PROMPT], [7, 9, 1, 9, 8, 6]), *continued(steps, 1, text[PROMPT:])]
    )
    expected = own_logits(text)
    assert is_close(found, expected[PROMPT - 1 :])
    others = own_logits(text, most=SELECTED - 1)
    assert (others - expected)[PROMPT - 1 :].abs().amax(-1).min() > 1e-3 * expected.abs().max()


@pytest.mark.parametrize("rates", [(4, 128), (4, 32), (3, 5)], ids=["no group", "later", "odd"])
def test_groups_may_be_longer_than_texts_or_contexts_and_of_any_size(rates: tuple[int, int]) -> None:
    steps, text = runner(rates, context_buckets=(16, 64)), random_tokens(PROMPT + 9, seed=2)
    steps.reset_slots()
    found = torch.stack([prefill_pieces(steps, 0, text[:PROMPT], [5, 10, 16, 9]), *continued(steps, 0, text[PROMPT:])])
    assert is_close(found, own_logits(text, rates)[PROMPT - 1 :])


@pytest.mark.parametrize(
    "sizes", [pytest.param({}, id="long rows", marks=pytest.mark.full), pytest.param(SHORT_ROWS, id="short rows")]
)
def test_no_cut_neighbor_slot_or_old_content_changes_a_bit(sizes: dict[str, Any]) -> None:
    steps, text = runner(deterministic=True, **sizes), random_tokens(24, seed=3)
    config, prompt = steps.config, text[:22]
    most = config.prefill_chunk_size * config.ctx_batch_size

    def run(slot: int, pieces: list[int], *, neighbors: bool, before: float | None) -> list[Tensor]:
        steps.reset_slots()
        fill_rows(steps, spec(), range(4), before)
        other, start, logits = (slot + 1) % 3, 0, torch.empty(0)
        if neighbors:
            prefill_pieces(steps, other, random_tokens(11, seed=slot), [3] * 3 + [2])
        for count in pieces:
            beside = {other: start} if neighbors else {}
            output = steps.run_step([PromptPiece(slot, prompt[start : start + count])], decode_rows(steps, beside))
            assert output.chunk_logits is not None
            logits, start = as_tensor(output.chunk_logits[0]), start + count
        return [logits, continued(steps, slot, text[22:])]

    expected = run(0, [most] * (22 // most) + [22 % most], neighbors=False, before=0.0)
    assert all(each.isfinite().all() for each in expected)

    @examples(20)
    @given(cut_in_pieces(22, most), st.integers(0, 2), st.booleans(), st.sampled_from([None, torch.nan, torch.inf]))
    def check(pieces: list[int], slot: int, neighbors: bool, before: float | None) -> None:
        assert all(map(torch.equal, run(slot, pieces, neighbors=neighbors, before=before), expected))

    check()


def test_who_sees_the_key_of_a_broken_token_is_not_finite_and_nobody_else() -> None:
    steps = runner()
    steps.reset_slots()
    for slot in (0, 1):
        prefill_pieces(steps, slot, random_tokens(14, seed=6), [14])
    state = read_state(steps.executable, "kv_cache.buffer_1_0")
    state[1, :, 12 % 8] = torch.nan  # of a token whose group has no key yet
    write_state(steps.executable, "kv_cache.buffer_1_0", state)
    before = decode_tokens(steps, {0: 5, 1: 5})[1]
    assert before[:2].isfinite().all()  # token 14
    logits = decode_tokens(steps, {0: 5, 1: 5})[1]  # token 15 ends the group
    assert logits[0].isfinite().all() and logits[1].isnan().all()
    steps.reset_slots()
    assert prefill_pieces(steps, 1, random_tokens(20, seed=7), [16, 4]).isfinite().all()


def test_what_a_model_keeps_is_found_by_running_it() -> None:
    assert spec().states_of(CompressedKeyState) == (
        CompressedKeyState(1, 0, rate=4, spans=2, width=64, key_dim=16),
        CompressedKeyState(1, 1, rate=4, spans=2, width=64, key_dim=16),
        CompressedKeyState(2, 0, rate=8, spans=1, width=32, key_dim=16),
    )
    assert not spec().reuses_prefixes and not spec().states_of(IndexKeyState)
    assert ModelSpec.from_dict(json.loads(json.dumps(spec().to_dict()))) == spec()
    config = tiny_config(prefill_chunk_size=10, ctx_batch_size=2, sequence_length=32, context_buckets=None)
    shapes = {state.name.removeprefix("kv_cache."): state.shape for state in state_specs(config, spec())}
    # Three slots; behind them as many rows as 23 tokens of a step fill, and the keys of 3 + 2 * 3 and 3 + 2 * 2 groups.
    assert shapes["buffer_1_0"] == (3 + 3, 1, 8, 64) and shapes["buffer_2_0"] == (3 + 3, 1, 8, 32)
    assert shapes["group_1_1"] == (3 + 2, 1, 8, 16) and shapes["group_2_0"] == (3 + 2, 1, 4, 16)
    short = tiny_config(prefill_chunk_size=2, ctx_batch_size=1, sequence_length=7, context_buckets=None)
    assert not [state.name for state in state_specs(short, spec()) if "_2_" in state.name]


def test_compressed_keys_that_are_not_seen_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the prompt of several groups: the short one ends before the first group of eight."""
    visible = attention_rows.visible_groups

    def late(position_ids: Tensor, rate: int, groups: int) -> Tensor:
        return visible(position_ids - (rate if rate == 8 else 0), rate, groups)

    monkeypatch.setattr(attention_rows, "visible_groups", late)
    with pytest.raises(
        ValueError, match="it computes compressed keys otherwise over 24 tokens in chunks than at once"
    ):
        inspect_model(cached())


def test_blocks_give_the_bits_of_slots() -> None:
    sizes: dict[str, Any] = {"sequence_length": 128, "context_buckets": (128,), "ctx_batch_size": 1}
    slots, blocks = runner(**sizes), runner(kv_block_size=64, **sizes)
    text = random_tokens(90, seed=8)
    for steps in (slots, blocks):
        steps.reset_slots()
    blocks.assign_blocks(2, 0, [3])
    blocks.assign_blocks(1, 0, [5, 0])
    for steps in (slots, blocks):
        prefill_pieces(steps, 2, random_tokens(20), [8, 8, 4])
    pieces = [8] * 11 + [2]
    assert torch.equal(prefill_pieces(slots, 1, text, pieces), prefill_pieces(blocks, 1, text, pieces))
    assert torch.equal(decode_tokens(slots, {1: 7})[1][1], decode_tokens(blocks, {1: 7})[1][1])


def test_what_does_not_go_with_compressed_keys_is_refused() -> None:
    steps = runner()
    steps.reset_slots()
    prefill_pieces(steps, 0, random_tokens(9), [9])
    with pytest.raises(
        ValueError, match="slot 1 keeps state of all its tokens together: its first 8 cannot be reused without"
    ):
        reuse_prefix(steps, 1, 0, 8)
    with pytest.raises(ValueError, match="its layers keep compressed keys, of which ranks do not have parts yet"):
        shard_plan(cached(), 2)
    sizes: dict[str, Any] = {
        "kv_block_size": 64,
        "sequence_length": 128,
        "context_buckets": (128,),
        "output_logits": False,
    }
    check_states(cached(), spec(), tiny_config(**sizes))
    with pytest.raises(
        ValueError, match=r"2 layers of DeepseekV4ForCausalLM keep compressed keys, .*kv_block_size=64"
    ):
        check_states(cached(), spec(), tiny_config(target="hlo", **sizes))


def test_generated_texts_are_those_of_transformers_and_its_cache(tmp_path: Path) -> None:
    """Left padding, more requests than slots, and slots that others had before."""
    reference().save_pretrained(tmp_path / "checkpoint")
    made = NeuronModelForCausalLM.from_pretrained(export_tiny(tmp_path / "checkpoint", tmp_path / "out"))
    made.generation_config.eos_token_id = None
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
    prompts = [random_tokens(count, seed=count).tolist() for count in (1, 23, 7, 16)]
    with few_keys(reference(), SELECTED):
        expected = [reference().generate(torch.tensor([each]), **options)[0, len(each) :].tolist() for each in prompts]
    longest = max(map(len, prompts[:3]))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in prompts[:3]])
    found = made.generate(ids, attention_mask=(ids != 0).long(), **options)[:, longest:].tolist()
    assert found == expected[:3]
    assert made.generate(torch.tensor([prompts[3]]), **options)[0, len(prompts[3]) :].tolist() == expected[3]


@pytest.mark.slow
def test_the_cpu_target_computes_the_same(tmp_path: Path) -> None:
    reference().save_pretrained(tmp_path / "checkpoint")
    steps = artifact_runner(export_tiny(tmp_path / "checkpoint", tmp_path / "cpu", target="cpu"))
    text = random_tokens(PROMPT + 5, seed=9)
    logits = []
    for slot, pieces in enumerate(([16, 16, 8], [3, 16, 5, 16], [1] * PROMPT)):
        logits.append(
            torch.stack([prefill_pieces(steps, slot, text[:PROMPT], pieces), *continued(steps, slot, text[PROMPT:])])
        )
    assert is_close(logits[0], own_logits(text)[PROMPT - 1 :])
    assert all(torch.equal(logits[0], each) for each in logits[1:])
    steps.reset_slot(1)
    prefill_pieces(steps, 1, text[:21], [16, 5])  # compressed keys, and tokens that none is made of yet
    steps.keep_state(1, 3)
    prefill_pieces(steps, 1, random_tokens(9), [9])
    reuse_prefix(steps, 2, 1, 21, 3)
    last = prefill_pieces(steps, 2, text[21:PROMPT], [16, 3])
    assert torch.equal(torch.stack([last, *continued(steps, 2, text[PROMPT:])]), logits[0])


class _Groups:
    """Five compressed keys of ones; and who keeps them."""

    columns = 5

    def take_windows(self, layer: Any, index: int, values: Tensor, gates: Tensor) -> GroupWindows:
        return GroupWindows(values, gates, torch.zeros(1, dtype=torch.int32))

    def add_overlap(self, layer: Any, index: int) -> None:
        """Nothing."""

    def keep_keys(self, layer: Any, index: int, keys: Tensor) -> _Groups:
        assert keys.shape == (3, 4)
        return self

    def attended_keys(self) -> CompressedKeys:
        return CompressedKeys(torch.ones(4, 1, 5, 4), 4)


def standing() -> Iterator[tuple[Callable[[Any, Any], object], str]]:
    """What model code might do with its cache's layer and compressed keys, and the reason for which it is refused."""
    own = torch.ones(1, 1, 3, 4)
    yield lambda layer, keys: layer.buffer_kv, "layer 0 reads .buffer_kv of its cache"
    yield lambda layer, keys: layer.update_compressor_states("other", own[0]), "keys of no tokens by the name 'other'"
    yield (
        lambda layer, keys: layer.store_compression_weights("compressor", own[0], own[0]),
        "twice by the name 'compressor'",
    )
    yield lambda layer, keys: layer.store_compression_weights("other", own[0], own), r"values \[1, 3, 4\] and gates"
    yield lambda layer, keys: keys.sum(), "reads .sum of them"
    yield lambda layer, keys: torch.stack([own[0], keys]), "passes them to stack"
    yield lambda layer, keys: torch.cat([keys.unsqueeze(1), own], dim=2), "in another order than after a step's own"
    yield lambda layer, keys: torch.cat([own, keys.unsqueeze(1)], dim=1), "along dimension 1"
    yield lambda layer, keys: torch.cat([own.expand(1, 2, 3, 4), keys.unsqueeze(1)], dim=2), r"to keys \[1, 2, 3, 4\]"
    yield lambda layer, keys: torch.cat([own, keys.unsqueeze(1)], dim=2).sum(), "reads .sum of them"
    yield lambda layer, keys: torch.relu(torch.cat([own, keys.unsqueeze(1)], dim=2)), "passes them to relu"
    yield lambda layer, keys: split_joined(torch.cat([own, keys.unsqueeze(1)], dim=2), own), "and values with others"


@pytest.mark.parametrize(("use", "reason"), list(standing()))
def test_other_uses_are_refused(use: Callable[[Any, Any], object], reason: str) -> None:
    layer = CompressingLayers(_Groups(), {0: 4})[0]  # type: ignore[arg-type]
    layer.store_compression_weights("compressor", torch.ones(1, 3, 4), torch.ones(1, 3, 4))
    keys = layer.update_compressor_states("compressor", torch.ones(1, 3, 4))
    assert isinstance(keys, GroupKeys) and keys.shape == (1, 5, 4)
    with pytest.raises(UnsupportedModelError, match=reason):
        use(layer, keys)


def test_compressed_keys_reach_attention_behind_the_steps_own() -> None:
    layers = CompressingLayers(_Groups(), {0: 4})  # type: ignore[arg-type]
    layers[0].store_compression_weights("compressor", torch.ones(1, 3, 4), torch.ones(1, 3, 4))
    keys = layers[0].update_compressor_states("compressor", torch.ones(1, 3, 4)).unsqueeze(1)
    own = torch.zeros(1, 1, 3, 4)
    joined = torch.cat([own, keys], dim=2)
    key, value, compressed = split_joined(joined, joined)
    assert key is own and value is own and compressed is not None and compressed.rate == 4
    assert split_joined(own, own) == (own, own, None)
    with pytest.raises(UnsupportedModelError, match="layer 1 keeps something in a layer of its cache"):
        layers[1]


def test_a_layer_that_is_looked_at_makes_a_key_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    compressor = type(cached().model.layers[2].self_attn.compressor)
    forward = compressor.forward

    def other(self: Any, hidden_states: Tensor, residual: Tensor, positions: Tensor, values: Any, number: int) -> Any:
        layer = values.layers[number]
        keep = layer.update_compressor_states
        layer.update_compressor_states = lambda name, keys: keep(name, keys[:, :1])
        return forward(self, hidden_states, residual, positions, values, number)

    monkeypatch.setattr(compressor, "forward", other)
    with pytest.raises(UnsupportedModelError, match="layer 2 makes 1 keys of 2 groups of 8 tokens"):
        look_at(cached())


def test_a_selection_of_compressed_keys_takes_no_mask() -> None:
    layer = CompressingLayers(_Groups(), {0: 4})[0]  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="selects compressed keys by other scores"):
        SlotGroupKeys(None, layer, None).select_top(torch.ones(3, 1, 5), ScoresOf(CausalMask(None)), 2)  # type: ignore[arg-type]
