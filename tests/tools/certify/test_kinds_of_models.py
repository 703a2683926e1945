# SPDX-License-Identifier: Apache-2.0
"""Models of twelve kinds, on one rank and on several: exported by the command, linted, certified, and verified again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from optimum.commands import optimum_cli
from sharded_ranks import make_model

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.tools.certify.document import Certificate


KINDS = (
    "llama", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe", "lfm2", "deepseek_v2", "llama4",
    "qwen3_next", "kimi_linear", "mamba2", "nemotron_h",
)  # fmt: skip
RANKS = (1, 2, 4)
# Experts, latent keys and complex rotations, on several ranks; the others by the full profile.
QUICK = {("deepseek_v2", 2)}
SIZES = ("--batch-size", "2", "--sequence-length", "32", "--prefill-chunk-size", "8", "--context-buckets", "32")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["optimum-cli", *words])
    optimum_cli.main()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=[] if (name, ranks) in QUICK else [pytest.mark.full])
        for name in KINDS
        for ranks in RANKS
    ],
)
def test_a_model_is_lowered_linted_and_certified(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    make_model(name).save_pretrained(tmp_path / "checkpoint")
    folder = tmp_path / "out"
    target = ("--target", "hlo", "--tensor-parallel-size", str(ranks), "--dtype", "bfloat16")
    run(
        monkeypatch,
        "export",
        "neuron",
        str(folder),
        "--model",
        str(tmp_path / "checkpoint"),
        *target,
        *SIZES,
        "--certify",
    )
    certificate = Certificate.read(folder)
    graphs = Artifact.open(folder).graphs
    assert {graph.kind for graph in graphs} == {"token_generation", "chunked_prefill", "mixed"}
    assert {graph.name for graph in graphs} < certificate.graphs.keys() == certificate.executed.keys()
    compared = {(rank, expected.dtype) for expected in certificate.expected for _, _, rank in expected.outputs}
    assert compared == {(rank, dtype) for rank in range(ranks) for dtype in ("float32", "bfloat16")}
    assert {each.dtype for each in certificate.comparisons} == {"float32", "bfloat16"}
    assert all(each.noise < 1e-5 for each in certificate.comparisons if each.dtype == "float32")
    capsys.readouterr()
    run(monkeypatch, "neuron", "inspect", str(folder), "--verify")
    shown = capsys.readouterr().out
    assert "lint rules passed" in shown and "DIFFERS" not in shown
