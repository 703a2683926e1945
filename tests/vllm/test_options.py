# SPDX-License-Identifier: Apache-2.0
"""Types and steps that differ from an artifact's, artifacts that are damaged, and where a user reads about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import run_until_it_ends
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

from optimum_neuron.vllm.platform import NeuronPlatform
from optimum_neuron.vllm.settings import ARTIFACT_VARIABLE


VOCAB = 49152


@pytest.fixture(autouse=True)
def _served_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ARTIFACT_VARIABLE, "")


def configure(model: Path, **arguments: Any) -> VllmConfig:
    """What `vllm serve` does before it starts an engine."""
    return EngineArgs(model=str(model), **arguments).create_engine_config()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_type_of_an_artifact_comes_before_what_vllm_would_choose(
    export_text: Callable[..., Path], dtype: str
) -> None:
    artifact = export_text(dtype=dtype)
    for asked in ("auto", dtype):
        assert configure(artifact, dtype=asked).model_config.dtype == getattr(torch, dtype)


def test_the_type_of_a_checkpoint_is_refused_where_the_artifact_has_another(export_text: Callable[..., Path]) -> None:
    with pytest.raises(
        ValueError, match=r"--dtype float32 differs from the bfloat16 that the artifact was exported with"
    ):
        configure(export_text(dtype="bfloat16"), dtype="float32")


def test_a_larger_step_than_the_graphs_hold_is_kept_and_more_requests_than_slots_wait(
    export_text: Callable[..., Path],
) -> None:
    vllm_config = configure(export_text(), max_model_len=300, max_num_seqs=100, max_num_batched_tokens=1200)
    for _ in range(2):
        assert vllm_config.scheduler_config.max_num_batched_tokens == 1200
        assert vllm_config.scheduler_config.max_num_seqs == 4
        vllm_config.__post_init__()  # as in the engine's process, from what it is given


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: truncate(folder / "weights" / "model.safetensors"), r"is truncated: 1,000 bytes"),
        (lambda folder: (folder / "weights" / "model.safetensors").unlink(), r"weights/model\.safetensors"),
        (lambda folder: truncate(folder / "neuron_config.json"), r"neuron_config\.json is not valid JSON"),
        (
            lambda folder: set_version(folder / "neuron_config.json", 999),
            r"has format_version 999, this program reads",
        ),
    ],
    ids=["truncated", "missing", "no_json", "newer"],
)
def test_a_damaged_artifact_is_refused_before_an_engine_starts(
    export_text: Callable[..., Path], tmp_path: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    folder = Path(shutil.copytree(export_text(), tmp_path / "damaged"))
    damage(folder)
    with pytest.raises(ValueError, match=sentence):
        configure(folder)


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
