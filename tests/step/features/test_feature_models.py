# SPDX-License-Identifier: Apache-2.0
"""Models with each feature of layers as step graphs: transformers' logits, and the same bits whatever the cut, the neighbors, the slot and
the blocks; on the cpu target as well."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feature_models import FEATURES, spec_of
from helpers import (
    artifact_runner,
    as_tensor,
    decode_rows,
    decode_tokens,
    eager_runner,
    examples,
    export_tiny,
    prefill_pieces,
    random_tokens,
    read_state,
    reuse_prefix,
    state_names,
    tiny_config,
    write_state,
)
from hypothesis import given
from hypothesis import strategies as st
from selecting import cut_in_pieces
from torch import Tensor
from transformers import GenerationMixin

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.core import PromptPiece
from optimum_neuron.parity.conditions import few_keys
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.model_spec import ModelSpec


# One of each mechanism; the others by the full profile, but for their logits.
FEW = {
    "deepseek_v4", "short rows", "glm_moe_dsa", "minimax_m3_vl_text", "qwen4_exp_text", "gated delta", "vectors", "bloom", "falcon",
    "codegen", "gpt_oss", "qwen3_moe", "lfm2", "gemma2 in int8", "gpt_oss in fp8",
}  # fmt: skip
BLOCKS: dict[str, Any] = {
    "sequence_length": 128,
    "context_buckets": (128,),
    "ctx_batch_size": 1,
    "prefill_chunk_size": 32,
}
ON_CPU = ("deepseek_v4", "glm_moe_dsa", "minimax_m3_vl_text", "gpt_oss", "qwen3_moe")


def marked(names: Any) -> Any:
    names = [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in names]
    return pytest.mark.parametrize("name", names)


@cache
def runner(name: str, deterministic: bool = False, **sizes: Any) -> GraphRunner:
    config = tiny_config(**FEATURES[name].sizes | sizes)
    return eager_runner(FEATURES[name].model(), config, deterministic=deterministic, spec=spec_of(name))


def text_of(count: int, seed: int = 1) -> np.ndarray:
    """Tokens that all models have, with one that is repeated in a long text."""
    text = 3 + random_tokens(count, seed=seed) % 250
    text[60:110] = text[60:61].repeat(len(text[60:110]))
    return text


def pieces_of(steps: GraphRunner, count: int) -> list[int]:
    most = steps.config.prompt_capacity
    return [most] * (count // most) + [count % most] * (count % most > 0)


def answers(steps: GraphRunner, slot: int, text: np.ndarray, pieces: list[int], start: int = 0) -> Tensor:
    """Return the logits of a prompt in pieces, and of each token after it."""
    stop = start + sum(pieces)
    logits = [prefill_pieces(steps, slot, text[start:stop], pieces)]
    return torch.stack([*logits, *(decode_tokens(steps, {slot: int(token)})[1][slot] for token in text[stop:])])


def fill_states(steps: GraphRunner, spec: ModelSpec, value: float) -> None:
    """Fill all that requests keep, but for codes and counts."""
    for name in state_names(steps, spec):
        state = read_state(steps.executable, name)
        if state.is_floating_point() and state.itemsize > 1:
            write_state(steps.executable, name, torch.full_like(state, value))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.full] * name.endswith("6"))
    for name, feature in FEATURES.items() if feature.expected is not None
])  # fmt: skip
def test_logits_are_those_of_transformers(name: str) -> None:
    feature, steps = FEATURES[name], runner(name)
    assert feature.expected is not None
    text = text_of(feature.prompt + 5)
    steps.reset_slots()
    most, half = steps.config.prompt_capacity, feature.prompt // 2
    found = answers(steps, 1, text, [1, *pieces_of(steps, half), *pieces_of(steps, feature.prompt - half - 1)])
    expected, error = feature.expected(text)
    assert most > 1 and (found - expected[feature.prompt - 1 :]).abs().max() <= error


@marked(FEATURES)
def test_no_cut_neighbor_slot_or_old_content_changes_a_bit(name: str) -> None:
    small = {"prefill_chunk_size": 8} if FEATURES[name].sizes.get("prefill_chunk_size", 0) > 8 else {}
    steps, spec, text = runner(name, deterministic=True, **small), spec_of(name), text_of(24, seed=3)
    most = steps.config.prompt_capacity

    def run(slot: int, pieces: list[int], *, neighbors: bool, before: float) -> list[Tensor]:
        steps.reset_slots()
        fill_states(steps, spec, before)
        other, start, logits = (slot + 1) % 3, 0, torch.empty(0)
        if neighbors:
            prefill_pieces(steps, other, text_of(11, seed=slot), pieces_of(steps, 11))
        for count in pieces:
            piece = PromptPiece(slot, text[start : start + count])
            output = steps.run_step([piece], decode_rows(steps, {other: start + 3} if neighbors else {}))
            assert output.chunk_logits is not None
            logits, start = as_tensor(output.chunk_logits[0]), start + count
        return [logits, *(decode_tokens(steps, {slot: int(token)})[1][slot] for token in text[22:])]

    expected = run(0, pieces_of(steps, 22), neighbors=False, before=0.0)
    assert all(each.isfinite().all() for each in expected)

    @examples(16)
    @given(cut_in_pieces(22, most), st.integers(0, 2), st.booleans(), st.sampled_from([0.5, torch.nan, torch.inf]))
    def check(pieces: list[int], slot: int, neighbors: bool, before: float) -> None:
        assert all(map(torch.equal, run(slot, pieces, neighbors=neighbors, before=before), expected))

    check()


@marked([name for name in FEATURES if name not in ("state space", "short rows", "lfm2")])
def test_blocks_give_the_bits_of_slots_wherever_they_lie(name: str) -> None:
    slots, blocks = runner(name, **BLOCKS), runner(name, kv_block_size=64, **BLOCKS)
    spec, text, found = spec_of(name), text_of(93, seed=8), []
    for steps in (slots, blocks):
        steps.reset_slots()
        fill_states(steps, spec, 0.0 if steps is slots else torch.nan)
    blocks.assign_blocks(2, 0, [3])
    blocks.assign_blocks(1, 0, [5, 0])
    for steps in (slots, blocks):
        prefill_pieces(steps, 2, text_of(20), [8, 12])
        logits = prefill_pieces(steps, 1, text[:90], [32, 32, 26])
        for index, token in enumerate(text[90:]):
            chunks = [PromptPiece(2, text_of(9, seed=index))] if index else []
            output = steps.run_step(chunks, decode_rows(steps, {1: int(token)}))
            assert output.decode_logits is not None
            logits = torch.cat([logits, as_tensor(output.decode_logits[1])])
        found.append(logits)
    assert torch.equal(*found)


def check_prefix(steps: GraphRunner, spec: ModelSpec, text: np.ndarray, expected: Tensor) -> None:
    """Reuse the first 21 tokens of a slot, with a snapshot where slots keep state; another text follows them there."""
    steps.reset_slots()
    snapshot = None if spec.reuses_prefixes else 3
    prefill_pieces(steps, 1, text[:21], pieces_of(steps, 21))
    if snapshot is not None:
        steps.keep_state(1, snapshot)
        with pytest.raises(ValueError, match="slot 1 keeps state of all its tokens together: its first 20 cannot"):
            reuse_prefix(steps, 1, 1, 20)
    prefill_pieces(steps, 1, text_of(9), pieces_of(steps, 9))
    reuse_prefix(steps, 2, 1, 21, snapshot)
    assert torch.equal(answers(steps, 2, text, pieces_of(steps, 19), start=21), expected)


@marked([name for name in FEATURES if FEATURES[name].prompt == 40])
def test_a_reused_prefix_is_continued_without_a_changed_bit(name: str) -> None:
    steps, text = runner(name, deterministic=True), text_of(42, seed=4)
    steps.reset_slots()
    expected = answers(steps, 0, text, pieces_of(steps, 40))
    check_prefix(steps, spec_of(name), text, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [*ON_CPU, *(pytest.param(each, marks=pytest.mark.full) for each in ("qwen4_exp_text", "deepseek_v3", "codegen"))],
)
def test_the_cpu_target_computes_the_same(name: str, tmp_path: Path) -> None:
    feature, text = FEATURES[name], text_of(45, seed=9)
    feature.model().save_pretrained(tmp_path / "checkpoint")
    steps = artifact_runner(export_tiny(tmp_path / "checkpoint", tmp_path / "cpu", target="cpu"))
    logits = [answers(steps, slot, text, each) for slot, each in enumerate(([16, 16, 8], [3, 16, 5, 16], [1] * 40))]
    if feature.expected is not None:
        expected, error = feature.expected(text)
        assert (logits[0] - expected[39:]).abs().max() <= error
    assert all(torch.equal(logits[0], each) for each in logits[1:])
    if name == "qwen3_moe":  # attends by the own kernel: graphs of all kinds give the same bits
        steps.reset_slots()
        prefill_pieces(steps, 0, text[:44], [16, 16, 12])
        mixed = steps.run_step([PromptPiece(2, text_of(11))], decode_rows(steps, {0: int(text[44])}))
        assert mixed.decode_logits is not None and torch.equal(as_tensor(mixed.decode_logits[0]), logits[0][-1])
        assert torch.equal(prefill_pieces(steps, 1, text, [16, 16, 13]), logits[0][-1])
    check_prefix(steps, spec_of(name), text, logits[0])


@pytest.mark.parametrize(
    ("name", "blocks"), [("deepseek_v4", False), ("gated delta", False), ("gated delta", True), ("qwen3_moe", False)]
)
def test_generated_texts_are_those_of_transformers(name: str, blocks: bool, tmp_path: Path) -> None:
    """Left padding, more requests than slots, requests that start alike, and rows that are preempted and computed again."""
    own: GenerationMixin = FEATURES[name].expected.args[0]()  # type: ignore[union-attr]
    own.save_pretrained(tmp_path / "checkpoint")  # type: ignore[attr-defined]
    sizes: dict[str, Any] = BLOCKS | {"kv_block_size": 64, "kv_cache_tokens": 192} if blocks else {}
    made = NeuronModelForCausalLM.from_pretrained(export_tiny(tmp_path / "checkpoint", tmp_path / "out", **sizes))
    made.generation_config.eos_token_id = None
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["max_new_tokens"] = 45 if blocks else 8
    shared = random_tokens(15, seed=7).tolist()
    prompts = [shared + random_tokens(count, seed=count).tolist() for count in (1, 9, 2, 16)]
    with few_keys(own, 3) if name == "deepseek_v4" else torch.no_grad():
        expected = [own.generate(torch.tensor([each]), **options)[0, len(each) :].tolist() for each in prompts]
    outputs = made.generate_batch(prompts, max_new_tokens=options["max_new_tokens"]).values()
    assert [output.generated_tokens for output in outputs] == expected
    # Rows of a batch are never preempted, and the cache of blocks has room for one.
    rows, longest = 1 if blocks else 3, max(map(len, prompts[: 1 if blocks else 3]))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in prompts[:rows]])
    found = made.generate(ids, attention_mask=(ids > 0).long(), **options)
    assert found[:, longest:].tolist() == expected[:rows]
