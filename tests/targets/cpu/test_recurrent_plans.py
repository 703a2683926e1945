# SPDX-License-Identifier: Apache-2.0
"""Models with recurrences on the cpu target: a plan's steps are kernels, and a token's bits those of any chunk and of decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import (
    artifact_runner,
    as_tensor,
    decode_rows,
    decode_tokens,
    export_tiny,
    prefill_pieces,
    random_tokens,
    reuse_prefix,
)
from recurrent import CONFIGS, model
from torch import Tensor
from transformers import AutoModelForCausalLM

from optimum_neuron.core import PromptPiece


PROMPT = 70
# Latent attention sums in another order for one token than for many.
BY_KERNELS = [kind for kind in CONFIGS if kind != "by channel"]


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=[pytest.mark.full] * (kind == "lightning")) for kind in CONFIGS]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def artifact(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recurrent")
    model(kind).save_pretrained(folder / "model")
    sizes = {"prefill_chunk_size": 24, "sequence_length": 128, "context_buckets": (128,)}
    return export_tiny(folder / "model", folder / "out", target="cpu", **sizes)


def test_bits_follow_from_the_tokens_alone(kind: str, artifact: Path) -> None:
    """Whatever the cut, the slot, its former owner and the neighbours; and decoding gives the bits of a chunk."""
    runner, text = artifact_runner(artifact), random_tokens(PROMPT, seed=1)
    text[20:50] = text[20]
    own = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="eager").eval()
    own.load_state_dict(model(kind).state_dict())
    with torch.inference_mode():
        expected = own(input_ids=torch.as_tensor(text)[None].long(), use_cache=False).logits[0, -1]
    results: list[Tensor] = []
    for slot, pieces in ((0, [24, 24, 22]), (1, [1, 23, 5, 20, 21]), (0, [7] * 10)):
        runner.reset_slot(1 - slot)
        prefill_pieces(runner, 1 - slot, random_tokens(9, seed=slot), [9])
        runner.reset_slot(slot)
        results.append(prefill_pieces(runner, slot, text, pieces).clone())
    own_chunk, other_chunk, own_row = PromptPiece(1, text[-1:]), PromptPiece(0, random_tokens(5)), {1: int(text[-1])}
    for chunks, row in (([own_chunk], {0: 7}), ([], own_row), ([other_chunk], own_row)):
        runner.reset_slot(1)
        prefill_pieces(runner, 1, text[:-1], [24, 24, 21])
        output = runner.run_step(chunks, decode_rows(runner, row))
        found = output.decode_logits[1] if row is own_row else output.chunk_logits[0]
        results.append(as_tensor(found).clone())
    assert torch.allclose(results[0], expected.float(), atol=1e-5 * float(expected.abs().max()))
    for other in results[1 : None if kind in BY_KERNELS else -2]:
        assert torch.equal(other, results[0])
        assert torch.equal(results[-2], results[-1])
    assert torch.allclose(results[-1], results[0], atol=1e-5 * float(expected.abs().max()))


def test_a_snapshot_has_all_that_a_slot_keeps(kind: str, artifact: Path) -> None:
    """Taken behind chunks, and behind decode rows, where they compute the same."""
    runner, text = artifact_runner(artifact), random_tokens(PROMPT, seed=1)
    expected = prefill_pieces(runner, 0, text, [24, 24, 22]).clone()
    prefill_pieces(runner, 1, text[:40], [24, 16])
    runner.keep_state(1, 5)
    if kind in BY_KERNELS:
        for token in text[40:45]:
            decode_tokens(runner, {1: int(token)})
    else:
        prefill_pieces(runner, 1, text[40:45], [5])
    runner.keep_state(1, 0)
    prefill_pieces(runner, 1, random_tokens(9), [9])
    for slot, snapshot, length in ((0, 5, 40), (2, 0, 45), (1, 0, 45)):
        reuse_prefix(runner, slot, 1, length, snapshot)
        assert torch.equal(prefill_pieces(runner, slot, text[length:], [1, 23, PROMPT - length - 24]), expected)


def test_recurrences_are_kernels_and_keep_one_state(kind: str, artifact: Path) -> None:
    for path in (artifact / "graphs").glob("*.json"):
        steps = json.loads(path.read_text())["plan"]["steps"]
        own = [step for step in steps if step["kind"] in ("Walk", "Convolve")]
        # Lightning attention has no convolution, and what a layer's own code convolves is a Map.
        without = {"Convolve"} if kind in ("lightning", "vectors") else set()
        assert {step["kind"] for step in own} == {"Walk", "Convolve"} - without
        if kind in BY_KERNELS:
            assert all(step["tokens"] for step in own)  # idle rows and padding are left out
    tensors = json.loads(next((artifact / "graphs").glob("*.json")).read_text())["tensors"]
    assert not any("anchor" in name or "tail" in name or "scanned" in name for name in tensors)
