# SPDX-License-Identifier: Apache-2.0
"""Artifacts by transformers' own names: they load where this package was imported, and elsewhere the error says what to call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import export_tiny, python_process
from transformers import AutoModelForCausalLM, pipeline

from optimum_neuron import NeuronModelForCausalLM


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny(tiny_checkpoint, tmp_path_factory.mktemp("auto") / "artifact")


def test_the_auto_class_and_a_pipeline_load_an_artifact_by_its_folder(artifact: Path, tiny_checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(artifact), dtype="auto")
    assert isinstance(model, NeuronModelForCausalLM)
    generator = pipeline("text-generation", model=str(artifact))
    assert isinstance(generator.model, NeuronModelForCausalLM)
    options = {"do_sample": False, "max_new_tokens": 8, "return_full_text": False}
    expected = pipeline("text-generation", model=str(tiny_checkpoint), dtype=torch.float32)("Hello", **options)
    assert generator("Hello", **options) == expected


def test_a_checkpoint_stays_transformers_own(tiny_checkpoint: Path) -> None:
    assert type(AutoModelForCausalLM.from_pretrained(tiny_checkpoint)).__module__.startswith("transformers.")


def test_without_this_package_the_error_says_what_to_call(artifact: Path) -> None:
    program = f"from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained({str(artifact)!r})"
    process = python_process(program)
    error = process.communicate(timeout=300)[1].splitlines()[-1]
    assert process.returncode == 1
    assert "this is an artifact - load it by optimum_neuron.NeuronModelForCausalLM.from_pretrained" in error
