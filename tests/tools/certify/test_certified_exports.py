# SPDX-License-Identifier: Apache-2.0
"""Exports that are certified: models of twelve kinds on one rank and on several, and logits of prompts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from helpers import Cli, export_tiny, random_tokens
from lowered_again import make_case, places
from neuron_fixtures import certificate_of
from sharded_ranks import make_model

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.step.spec import PROMPT_LOGITS
from optimum_neuron.targets.neuron.lowering import lower_all as rank_model


KINDS = (
    "llama", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe", "lfm2", "deepseek_v2", "llama4",
    "qwen3_next", "kimi_linear", "mamba2", "nemotron_h",
)  # fmt: skip
RANKS = (1, 2, 4)
# Experts, latent keys and complex rotations, on several ranks, without mixed graphs; the others by the full profile.
QUICK = {("deepseek_v2", 2)}
SIZES = ("--batch-size", "2", "--sequence-length", "32", "--prefill-chunk-size", "8", "--context-buckets", "32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=[] if (name, ranks) in QUICK else [pytest.mark.full])
        for name in KINDS
        for ranks in RANKS
    ],
)
def test_a_model_is_lowered_linted_and_certified(name: str, ranks: int, tmp_path: Path, cli: Cli) -> None:
    make_model(name).save_pretrained(tmp_path / "checkpoint")
    folder = tmp_path / "out"
    mixed = (name, ranks) not in QUICK
    target = ["--target", "hlo", "--tensor-parallel-size", str(ranks), "--dtype", "bfloat16"]
    target += ["--certify", *([] if mixed else ["--no-mixed-step"])]
    assert cli("export", "neuron", folder, "--model", tmp_path / "checkpoint", *SIZES, *target)[0] == 0
    certificate = certificate_of(folder)
    graphs = Artifact.open(folder).graphs
    kinds = ["chunked_prefill", "mixed", "token_generation"] if mixed else ["chunked_prefill", "token_generation"]
    assert sorted({graph.kind for graph in graphs}) == kinds
    assert {graph.name for graph in graphs} < certificate.graphs.keys()
    assert {each.dtype for each in certificate.comparisons} == {"float32", "bfloat16"}
    assert all(each.bound < 16e-5 for each in certificate.comparisons if each.dtype == "float32")


NOISE = 2e-5  # of other orders of summation in float32


def test_lowered_graphs_score_as_the_eager_target_does(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Several rows, longer than a chunk, padded on either side."""
    paths = (
        export_tiny(tiny_checkpoint, tmp_path / name, target=name, prompt_logits=True) for name in ("hlo", "eager")
    )
    model, eager = map(NeuronModelForCausalLM.from_pretrained, paths)
    ids = torch.from_numpy(random_tokens(3 * 20)).long().view(3, 20)
    mask = torch.ones_like(ids)
    mask[1, :6], mask[2, 15:] = 0, 0
    logits = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits, eager(ids, attention_mask=mask).logits, atol=NOISE, rtol=0)
    for row in range(3):
        alone = model(ids[row][mask[row].bool()][None]).logits[0]
        assert torch.equal(alone, logits[row][mask[row].bool()])
    assert torch.equal(model(ids, attention_mask=mask, logits_to_keep=4).logits, logits[:, -4:])


@pytest.mark.parametrize("split", [pytest.param(False, marks=pytest.mark.full), True])
def test_ranks_gather_the_vocabulary_of_all_tokens(split: bool, tmp_path: Path) -> None:
    """Also where each has a part of the tokens."""
    case = make_case(tmp_path / "two", 2, "scoring", batch_size=4, prompt_logits=True)
    comparisons = case.compare(case.lower("scoring", split=split))
    assert places(comparisons) == []
    assert any(each.subject.endswith(PROMPT_LOGITS) for each in comparisons)


def test_logits_of_other_tokens_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(tmp_path / "one", 1, "scoring", prompt_logits=True)
    ops = dataclasses.replace(rank_model.NEURON_OPS, full_logits=lambda logits: logits.roll(int(len(logits) > 2), 0))
    monkeypatch.setattr(rank_model, "NEURON_OPS", ops)
    wrong = places(case.compare(case.lower("scoring")))
    assert len(wrong) == 1 and PROMPT_LOGITS in wrong[0]
