# SPDX-License-Identifier: Apache-2.0
"""Artifacts whose attention has a bias by column or coded keys and values: exact, and the same bits however prompts are cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from biased import BLOCKS, PIECES, PROMPT, SIZES, answers, model_of, own_logits, same
from coded_reference import reference
from helpers import artifact_runner, decode_tokens, export_tiny, generate, prefill_pieces, random_tokens, reuse_prefix

from optimum_neuron.artifact.artifact import Artifact


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("gpt_oss", "int8"), pytest.param("deepseek_v3", "fp8", marks=pytest.mark.full)]
)
def test_artifacts_equal_transformers_with_rounded_keys_and_values(
    sharp_checkpoints: dict[str, Path], tmp_path: Path, name: str, kind: str
) -> None:
    """And no cut, neighbor or copied prefix changes a bit."""
    path = export_tiny(sharp_checkpoints[name], tmp_path / name, target="cpu", kv_cache_dtype=kind)
    types = {each.name: each.dtype for each in Artifact.open(path).states()}
    assert types["kv_cache.key_1"] == {"int8": "int8", "fp8": "float8_e4m3fn"}[kind]
    assert types["kv_cache.valuescale_1"] == "float32"
    runner, expected = artifact_runner(path), reference(sharp_checkpoints[name], kind)
    prompt = random_tokens(27)
    tokens, logits = generate(runner, prompt, 12)
    with torch.no_grad():
        found = expected(torch.tensor([*prompt, *tokens[:-1]])[None]).logits[0, len(prompt) - 1 :]
    assert (logits - found).abs().median() < 1e-6 and (logits - found).abs().max() < 2e-4
    runner.reset_slots()
    whole = prefill_pieces(runner, 1, prompt, (8, 8, 8, 3))
    prefill_pieces(runner, 0, random_tokens(9, seed=3), (8, 1))
    decode_tokens(runner, {0: 7})
    reuse_prefix(runner, 2, 1, 21)
    assert torch.equal(prefill_pieces(runner, 2, prompt[21:], (1, 5)), whole)
    runner.reset_slot(1)
    assert torch.equal(prefill_pieces(runner, 1, prompt, (1, 8, 5, 8, 2, 3)), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bloom", *(pytest.param(each, marks=pytest.mark.full) for each in ("mpt", "falcon"))]
)
def test_the_cpu_target_computes_it_by_its_kernel_in_slots_and_in_blocks(name: str, tmp_path: Path) -> None:
    model_of(name).save_pretrained(tmp_path / "checkpoint")
    slots, blocks = (
        artifact_runner(export_tiny(tmp_path / "checkpoint", tmp_path / folder, **sizes, target="cpu"))
        for folder, sizes in (("slots", SIZES), ("blocks", BLOCKS))
    )
    found = answers(slots, 1, PIECES[0])
    text = [*PROMPT.tolist(), *(3 + index for index in range(5))]
    exact, own = (
        own_logits(name, text, dtype)[len(PROMPT) - 1 :].double() for dtype in (torch.float64, torch.float32)
    )
    assert (torch.stack(found) - exact).abs().max() <= 2 * (own - exact).abs().max()
    if name == "falcon":
        return  # its linear layers are products of its own code, left to torch, whose bits follow the graph
    slots.reset_slots()
    assert same(answers(slots, 0, PIECES[1], beside=False), found)
    blocks.assign_blocks(1, 0, (5, 0, 2))
    blocks.assign_blocks(2, 0, (3, 4))
    assert same(answers(blocks, 1, PIECES[1]), found)
