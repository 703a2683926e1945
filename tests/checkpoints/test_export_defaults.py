# SPDX-License-Identifier: Apache-2.0
"""An export follows the checkpoint's generation_config.json: the artifact can do what that asks, or the export says what it cannot."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import export_tiny
from transformers import AutoModelForCausalLM

from optimum_neuron import NeuronConfig, NeuronModelForCausalLM
from optimum_neuron.artifact.artifact import Artifact


@pytest.fixture
def checkpoint(sharp_checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharp_checkpoints["llama"], tmp_path / "checkpoint"))


def export(checkpoint: Path, facts: dict[str, Any], **options: Any) -> Path:
    (checkpoint / "generation_config.json").write_text(json.dumps(facts))
    return export_tiny(
        checkpoint, checkpoint.with_name("artifact"), overwrite=True, **{"output_logits": False} | options
    )


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"do_sample": True, "repetition_penalty": 1.05, "top_k": 20, "temperature": 0.7, "top_p": 0.8}, "repetition_penalty=1.05"),
        ({"no_repeat_ngram_size": 3, "min_new_tokens": 2, "eos_token_id": 2}, "no_repeat_ngram_size=3"),
        ({"min_new_tokens": 2, "eos_token_id": 2}, "min_new_tokens=2"),
        ({"bad_words_ids": [[5]]}, r"bad_words_ids=\[\[5\]\]"),
        ({"suppress_tokens": list(range(200))}, r"suppress_tokens=\[0, 1, 2, .*\.\.\., applied"),
        ({"typical_p": 0.9}, "typical_p=0.9"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True"),
    ],
)  # fmt: skip
def test_graphs_return_logits_where_the_file_needs_them(
    checkpoint: Path, facts: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = export(checkpoint, facts)
    assert len([each for each in caplog.messages if "as with --output-logits" in each]) == 1
    caplog.clear()
    assert Artifact.open(path).config.output_logits
    model = NeuronModelForCausalLM.from_pretrained(path, output_logits=False)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor([[40, 41, 42, 40, 41, 42]])
    tokens, expected = (
        each.generate(ids, do_sample=False, max_new_tokens=6, return_dict_in_generate=False)
        for each in (model, reference)
    )
    assert torch.equal(tokens, expected)
    assert model.generate_batch(ids.tolist())["req_0"].error is None
    same = NeuronConfig.from_dict(Artifact.open(path).config.to_dict() | {"output_logits": False})
    NeuronModelForCausalLM.from_pretrained(path, config=same)


@pytest.mark.parametrize(
    "facts",
    [
        {"do_sample": True, "temperature": 0.6, "top_k": 64, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.0},
        {"typical_p": 1.0, "epsilon_cutoff": 0.0, "no_repeat_ngram_size": 0, "temperature": 0.0, "top_k": -1, "use_cache": False},
        {"max_time": 60.0, "stop_strings": ["\u0000"]},
        {"max_new_tokens": 9999, "pad_token_id": -1, "eos_token_id": [2, 400], "max_window_size": 24000, "cache_implementation": "hybrid"},
    ],
)  # fmt: skip
def test_a_file_that_graphs_follow_needs_no_logits_and_no_word(
    checkpoint: Path, facts: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "optimum_neuron"):
        path = export(checkpoint, facts)
    assert not Artifact.open(path).config.output_logits and "generation_config" not in caplog.text
    model = NeuronModelForCausalLM.from_pretrained(path)
    assert model.generate(torch.tensor([[5, 6], [7, 8]])).shape[1] > 2


def test_what_no_artifact_does_is_said_by_the_export_and_refuses_no_call(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    facts = {
        "num_beams": 4, "penalty_alpha": 0.6, "guidance_scale": 1.5, "num_return_sequences": 4, "do_sample": True, "output_attentions": True,
    }  # fmt: skip
    path = export(checkpoint, facts)
    told = "\n".join(caplog.messages)
    for name in ("num_beams=4", "penalty_alpha=0.6", "guidance_scale=1.5", "output_attentions=True"):
        assert f"generation_config.json asks for {name}, which is left out: " in told
    assert "num_return_sequences=4, which is left out: it needs do_sample and batch_size=4" in told
    caplog.clear()
    model = NeuronModelForCausalLM.from_pretrained(path)
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)
    assert model.generate_batch([[5, 6]], max_new_tokens=3)["req_0"].error is None
    assert "left out" not in caplog.text
    with pytest.raises(ValueError, match="num_beams=4 is not supported: compiled graphs advance one sequence per row"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, num_beams=4, do_sample=False)


@pytest.mark.parametrize("facts", [{"repetition_penalty": -1.0}, {"do_sample": True, "min_p": 1.5}, {"top_k": 0.5}])
def test_a_value_that_transformers_refuses_is_refused_by_the_export(checkpoint: Path, facts: dict[str, Any]) -> None:
    (name,) = facts.keys() - {"do_sample"}
    with pytest.raises(ValueError, match=rf"generation_config.json has {name}=.*; correct or remove it"):
        export(checkpoint, facts)
    assert not checkpoint.with_name("artifact").exists()
