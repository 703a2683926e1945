# SPDX-License-Identifier: Apache-2.0
"""Artifacts that are damaged, requests that an artifact cannot answer, and where a user reads about it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving import run_until_it_ends
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

from optimum_neuron.config import NeuronConfig
from optimum_neuron.vllm.platform import NeuronPlatform
from optimum_neuron.vllm.sampling import check_request
from optimum_neuron.vllm.settings import ARTIFACT_VARIABLE, _fit_model


VOCAB = 49152


@pytest.fixture(autouse=True)
def _served_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ARTIFACT_VARIABLE, "")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: truncate(folder / "weights" / "model.safetensors"), r"is truncated: 1,000 bytes"),
        (
            lambda folder: set_version(folder / "neuron_config.json", 999),
            r"has format_version 999, this program reads",
        ),
    ],
    ids=["truncated", "newer"],
)
def test_a_damaged_artifact_is_refused_before_an_engine_starts(
    export_text: Callable[..., Path], tmp_path: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    folder = Path(shutil.copytree(export_text(), tmp_path / "damaged"))
    damage(folder)
    with pytest.raises(ValueError, match=sentence):
        EngineArgs(model=str(folder)).create_engine_config()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def set_version(path: Path, version: int) -> None:
    manifest = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(manifest | {"format_version": version}), encoding="utf-8")


def test_the_last_lines_that_a_user_sees_tell_the_reason(export_text: Callable[..., Path], tmp_path: Path) -> None:
    code, output = run_until_it_ends(tmp_path, export_text(), "--tensor-parallel-size", "2")
    assert code != 0
    last = "\n".join(output.splitlines()[-3:])
    assert "--tensor-parallel-size 2 is vLLM's, and an artifact brings its own" in last


@pytest.mark.parametrize("given", [[5, VOCAB], [-1], [5, 2**32 + 5], [1.5], [True]])
def test_token_ids_that_the_served_model_lacks_are_a_fault_of_the_request(
    export_text: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, given: list[Any]
) -> None:
    """vLLM compares ids with its tokenizer's, which may be more than the model's."""
    monkeypatch.setenv(ARTIFACT_VARIABLE, str(export_text()))
    NeuronPlatform.validate_request({"type": "token", "prompt_token_ids": [0, VOCAB - 1]}, SamplingParams())
    with pytest.raises(VLLMValidationError, match=r"the prompt (has the token id|holds) .* 0 to 49151"):
        NeuronPlatform.validate_request({"type": "token", "prompt_token_ids": given}, SamplingParams())


ON_TRN2 = NeuronConfig(target="trn2", top_logprobs=5, dtype="bfloat16")


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"logprobs": 6}, "--output-logits, or for logprobs alone with --top-logprobs 6"),
        ({"logprobs": -1}, "--output-logits"),
        ({"logprobs": 6, "presence_penalty": 1.0}, "--output-logits"),
    ],
)
def test_more_is_refused_with_the_remedy(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"export it with {remedy}") + "$"):
        check_request(SamplingParams(**options), ON_TRN2)


def test_a_mode_that_graphs_do_not_know_is_refused_at_the_start() -> None:
    model: Any = SimpleNamespace(max_model_len=16, dtype=torch.bfloat16, logprobs_mode="processed_logits")
    with pytest.raises(ValueError, match=r"--logprobs-mode processed_logits needs logits on the host"):
        _fit_model(model, ON_TRN2)
    _fit_model(model, replace(ON_TRN2, output_logits=True))
    model.logprobs_mode = "raw_logprobs"
    _fit_model(model, ON_TRN2)
