# SPDX-License-Identifier: Apache-2.0
"""Lowered graphs that score, executed: logits of all tokens of prompts, also where ranks share the vocabulary and the tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from helpers import export_tiny, random_tokens
from lowered_again import make_case, places

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.step.spec import PROMPT_LOGITS
from optimum_neuron.targets.neuron.lowering import lower_all as rank_model


NOISE = 2e-5  # of other orders of summation in float32


def test_lowered_graphs_score_as_the_eager_target_does(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Several rows, longer than a chunk, padded on either side."""
    paths = {
        name: export_tiny(tiny_checkpoint, tmp_path / name, target=name, prompt_logits=True)
        for name in ("eager", "hlo")
    }
    model, eager = (NeuronModelForCausalLM.from_pretrained(paths[name]) for name in ("hlo", "eager"))
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
