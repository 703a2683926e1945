# SPDX-License-Identifier: Apache-2.0
"""Artifacts of the cpu target whose keys and values are codes: by its kernels, and by torch where attention has no kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
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
