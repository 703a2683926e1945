# SPDX-License-Identifier: Apache-2.0
"""Graphs of models with experts, with few tokens and with many: in the forms that cost least, certified, with the eager target's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_layers import expert_kinds
from helpers import artifact_runner, export_tiny, generate, prefill_pieces, random_tokens, tiny_config
from moe import CONFIGS, make_checkpoint
from neuron_fixtures import certificate_of

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.targets.neuron.lint.lint import artifact_graphs, lint
from optimum_neuron.targets.neuron.lowering.lower_all import lower_all


# A decode row has fewer entries than there are experts, a chunk more tokens than a tile of rows.
SIZES: dict[str, Any] = {
    "batch_size": 1, "ctx_batch_size": 1, "sequence_length": 512, "prefill_chunk_size": 256, "context_buckets": (512,),
}  # fmt: skip
# Of a trial: fewer tokens than a tile.
SMALL = {"sequence_length": 64, "prefill_chunk_size": 32, "context_buckets": (64,)}
NOISE = 2e-5  # of logits up to 5, in float32
# Cheap to export.
QUICK = "qwen3_moe"
NAMES = [pytest.param(name, marks=[] if name == QUICK else [pytest.mark.full]) for name in CONFIGS]


def long_checkpoint(name: str, folder: Path) -> Path:
    checkpoint = make_checkpoint(name, folder)
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 1024}))
    return checkpoint


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_eager_target_s_and_chunk_boundaries_change_no_bit(name: str, tmp_path: Path) -> None:
    checkpoint = long_checkpoint(name, tmp_path / "checkpoint")
    folder = export_tiny(checkpoint, tmp_path / "hlo", target="hlo", certificate=True, **SIZES)
    assert certificate_of(folder).comparisons
    kinds = {}
    for graph, data, io in artifact_graphs(Artifact.open(folder)):
        assert not lint(graph, data, io, "hlo")
        kinds[graph.partition("_")[0]] = expert_kinds(data)
    assert kinds["token"] == {"gather"} and kinds["chunked"] == {"blocks"}
    runner = artifact_runner(folder)
    prompt = random_tokens(300)
    eager = artifact_runner(export_tiny(checkpoint, tmp_path / "eager", **SIZES))
    expected, logits = generate(eager, prompt, 6)
    found, found_logits = generate(runner, prompt, 6)
    assert found == expected and (logits - found_logits).abs().max() < NOISE
    runner.reset_slots()
    whole = prefill_pieces(runner, 0, prompt, [256, 44])
    for pieces in ([44, 256], [100, 100, 100], [1, 7, 248, 44]):
        runner.reset_slots()
        assert torch.equal(prefill_pieces(runner, 0, prompt, pieces), whole)


@pytest.mark.full
def test_what_is_executed_of_a_large_model_has_the_forms_of_its_artifact(tmp_path: Path) -> None:
    CONFIGS["qwen3_moe"]().save_pretrained(tmp_path)
    large, small = (tiny_config(target="trn2", **SIZES | changed) for changed in ({}, SMALL))
    alone, like = (
        {
            graph.kind: expert_kinds(graph.hlo)
            for graph in lower_all(tmp_path, small, {}, trust_remote_code=False, like=sizes)
            if graph.io.spec is not None
        }
        for sizes in (None, large)
    )
    assert alone == {"token_generation": {"gather"}, "chunked_prefill": {"all"}}
    assert like == {"token_generation": {"gather"}, "chunked_prefill": {"blocks"}}
