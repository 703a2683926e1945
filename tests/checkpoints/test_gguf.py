# SPDX-License-Identifier: Apache-2.0
"""GGUF files of every kind that the gguf package writes: dequantized to the numbers that their blocks stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from helpers import artifact_runner, export_tiny, generate, random_tokens, weights_of
from transformers import AutoModelForCausalLM

from optimum_neuron.artifact.artifact import Artifact


KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_blocks_become_the_numbers_that_they_stand_for(
    dtype: str, kind: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    exact = write_gguf(tiny_checkpoint, tmp_path / "tiny.gguf", kind)
    plain = kind in ("F32", "F16", "BF16")
    artifact = export_tiny(tmp_path / "tiny.gguf", tmp_path / "artifact", dtype=dtype, dequantize=not plain)
    assert Artifact.open(artifact).config.dtype == ("float32" if dtype == "auto" else dtype)
    weights = weights_of(Artifact.open(artifact))
    for name, tensor in exact.items():
        assert torch.equal(weights[f"model.{name}"], tensor.to(weights[f"model.{name}"].dtype)), name
    document = json.loads((artifact / "config.json").read_text(encoding="utf-8"))
    assert document["architectures"] == ["LlamaForCausalLM"] and "quantization_config" not in document


def test_the_artifact_answers_as_transformers_with_the_same_numbers(tiny_checkpoint: Path, tmp_path: Path) -> None:
    exact = write_gguf(tiny_checkpoint, tmp_path / "tiny.gguf", "Q4_1")
    artifact = export_tiny(tmp_path / "tiny.gguf", tmp_path / "artifact")
    prompt = random_tokens(20)
    tokens, logits = generate(artifact_runner(artifact), prompt, 5)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    model.load_state_dict(exact)
    expected = model(input_ids=torch.tensor([[*prompt.tolist(), *tokens]])).logits[0, 19:-1]
    assert tokens == expected.argmax(-1).tolist()
    torch.testing.assert_close(logits, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"temp": 0.7, "top_k": 20, "top_p": 0.8}, {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}),
        ({"penalty_repeat": 1.25}, {"repetition_penalty": 1.25}),
        ({"temp": 0.0, "top_k": 20}, {}),
    ],
)
def test_the_file_s_defaults_of_generation_are_the_artifact_s(
    named: dict[str, float], expected: dict[str, Any], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    write_gguf(tiny_checkpoint, tmp_path / "tiny.gguf", "F16", sampling=named)
    artifact = export_tiny(tmp_path / "tiny.gguf", tmp_path / "artifact", output_logits=False)
    document = json.loads((artifact / "generation_config.json").read_text(encoding="utf-8"))
    asked = {
        name: document[name]
        for name in ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
        if name in document
    }
    assert asked == pytest.approx(expected)
    assert Artifact.open(artifact).config.output_logits == ("repetition_penalty" in expected)
