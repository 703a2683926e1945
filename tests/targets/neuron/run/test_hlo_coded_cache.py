# SPDX-License-Identifier: Apache-2.0
"""Keys and values as codes in graphs of HLO: exact, the same bits however prompts are cut, copied with their scales, shared out to ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_reference import reference
from helpers import artifact_runner, decode_tokens, export_tiny, prefill_pieces, random_tokens, reuse_prefix

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.lint.lint import artifact_graphs, lint_artifact


PROMPT = random_tokens(27)
FORMS: dict[str, dict[str, Any]] = {
    "slots": {"kv_cache_dtype": "int8"},
    "blocks": {
        "kv_cache_dtype": "fp8", "sequence_length": 128, "context_buckets": (128,), "kv_block_size": 64, "kv_cache_tokens": 256,
    },
}  # fmt: skip


@pytest.mark.parametrize("form", ["slots", pytest.param("blocks", marks=pytest.mark.full)])
def test_graphs_equal_transformers_with_rounded_keys_and_values(
    sharp_checkpoints: dict[str, Path], tmp_path: Path, form: str
) -> None:
    options = FORMS[form]
    path = export_tiny(sharp_checkpoints["llama"], tmp_path / form, target="hlo", mixed_step=False, **options)
    runner, expected = artifact_runner(path), reference(sharp_checkpoints["llama"], options["kv_cache_dtype"])
    has_blocks = "kv_block_size" in options
    if has_blocks:
        runner.assign_blocks(0, 0, [2])
        runner.assign_blocks(1, 0, [0])
    whole = prefill_pieces(runner, 1, PROMPT, (8, 8, 8, 3))
    assert torch.equal(prefill_pieces(runner, 0, PROMPT, (1, 8, 5, 8, 2, 3)), whole)
    if not has_blocks:
        reuse_prefix(runner, 2, 1, 21)
        assert torch.equal(prefill_pieces(runner, 2, PROMPT[21:], (1, 5)), whole)
    decoded = decode_tokens(runner, {1: 5})[1][1]
    with torch.no_grad():
        found = expected(torch.tensor([*PROMPT, 5])[None]).logits[0, -2:]
    difference = (torch.stack([whole, decoded]) - found).abs()
    # Where a number lies between two codes, the last bit of its float32 decides; those of fp8 lie further apart.
    assert difference.max() < {"int8": 1e-3, "fp8": 5e-3}[options["kv_cache_dtype"]]
    check_graphs(Artifact.open(path), options["kv_cache_dtype"])


def test_ranks_have_the_codes_and_scales_of_their_own_heads(
    sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    options = {"kv_cache_dtype": "fp8", "tensor_parallel_size": 2, "mixed_step": False}
    path = export_tiny(sharp_checkpoints["llama"], tmp_path / "ranks", target="hlo", **options)
    check_graphs(Artifact.open(path), "fp8")
    data = next(data for name, data, _ in artifact_graphs(Artifact.open(path)) if name.startswith("token"))
    parameters = [each for _, each in hlo.instructions(hlo.parse(data)) if each.opcode == "parameter"]
    shapes = [(hlo.dtype_name(each.shape), tuple(each.shape.dimensions)) for each in parameters]
    assert shapes.count(("float8_e4m3fn", (4, 1, 64, 16))) == 4
    assert shapes.count(("float32", (4, 1, 64, 1))) == 4


def check_graphs(artifact: Artifact, kind: str) -> None:
    """No chip refuses them, and of what is as large as a layer's codes only products read numbers, unscaled."""
    for target in ("inf2", "trn2", "trn3"):
        assert lint_artifact(artifact, target) == []
    dtype = {"int8": "int8", "fp8": "float8_e4m3fn"}[kind]
    for name, data, _ in artifact_graphs(artifact):
        found = {each.id: each for _, each in hlo.instructions(hlo.parse(data))}
        numbers = {
            each.id
            for each in found.values()
            if each.opcode == "convert" and hlo.dtype_name(found[each.operand_ids[0]].shape) == dtype
        }
        has_attention = name.startswith(("token", "chunked"))
        assert bool(numbers) == has_attention
        for each in sorted(found.values(), key=lambda one: one.id):  # operands come first
            if not numbers & set(each.operand_ids):
                continue
            if each.opcode in ("transpose", "reshape", "broadcast", "slice"):
                numbers.add(each.id)
            elif each.opcode != "dot":
                # A decode row's own token, apart from its cache: 3 rows of 2 heads.
                assert each.opcode == "multiply" and math.prod(each.shape.dimensions) <= 3 * 2 * 16
