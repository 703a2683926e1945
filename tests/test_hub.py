# SPDX-License-Identifier: Apache-2.0
"""Artifacts and checkpoints from the Hub, through the Hub's own cache folder, offline."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from optimum_neuron import NeuronConfig, NeuronModelForCausalLM, export_model


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put_in_hub_cache(folder: Path, repo_id: str, cache_dir: Path) -> Path:
    """Lays a folder out as if the Hub's client had downloaded it."""
    repository = cache_dir / f"models--{repo_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    return Path(shutil.copytree(folder, repository / "snapshots" / COMMIT))


@pytest.fixture(scope="module")
def cpu_artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = NeuronConfig(sequence_length=64, prefill_chunk_size=8, target="cpu")
    return export_model(tiny_checkpoint, tmp_path_factory.mktemp("hub") / "artifact", config=config)


def generate(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 20)[None]
    return model.generate(ids, do_sample=False, max_new_tokens=5, eos_token_id=None, pad_token_id=0)


def test_native_code_from_the_hub_runs_only_when_trusted(
    cpu_artifact: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = put_in_hub_cache(cpu_artifact, "someone/tiny", tmp_path)
    expected = generate(NeuronModelForCausalLM.from_pretrained(cpu_artifact))
    trusting = NeuronModelForCausalLM.from_pretrained("someone/tiny", cache_dir=tmp_path, trust_remote_code=True)
    assert torch.equal(generate(trusting), expected)
    assert "compiling" not in caplog.text
    for code in (snapshot / "graphs").iterdir():
        code.write_bytes(b"hostile")
    careful = NeuronModelForCausalLM.from_pretrained("someone/tiny", cache_dir=tmp_path)
    assert torch.equal(generate(careful), expected)
    assert "its native code is not trusted" in caplog.text


def test_a_hub_artifact_needs_no_graph_files_where_they_are_not_trusted(cpu_artifact: Path, tmp_path: Path) -> None:
    snapshot = put_in_hub_cache(cpu_artifact, "someone/tiny", tmp_path)
    shutil.rmtree(snapshot / "graphs")
    model = NeuronModelForCausalLM.from_pretrained("someone/tiny", cache_dir=tmp_path)
    assert generate(model).shape == (1, 22)


def test_a_hub_checkpoint_is_exported(tiny_checkpoint: Path, tmp_path: Path) -> None:
    put_in_hub_cache(tiny_checkpoint, "someone/plain", tmp_path)
    sizes: dict[str, Any] = {"sequence_length": 64, "prefill_chunk_size": 8, "target": "eager"}
    model = NeuronModelForCausalLM.from_pretrained("someone/plain", cache_dir=tmp_path, **sizes)
    assert model.artifact.manifest["source"] == "someone/plain"
    with pytest.raises(FileNotFoundError, match=r"neither a folder nor a Hub repository with neuron_config\.json"):
        NeuronModelForCausalLM.from_pretrained("someone/plain", cache_dir=tmp_path, export=False)


def test_a_name_that_is_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="someone/missing"):
        NeuronModelForCausalLM.from_pretrained("someone/missing", cache_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a local path nor a Hub repository"):
        NeuronModelForCausalLM.from_pretrained("no such name!", cache_dir=tmp_path)
