# SPDX-License-Identifier: Apache-2.0
"""Artifacts and checkpoints from the Hub, through the Hub's own cache folder, offline."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import export_tiny

from optimum_neuron import NeuronModelForCausalLM, export_model
from optimum_neuron.artifact.find import find_artifact, is_from_hub
from optimum_neuron.checkpoints.find import find_config


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put_in_hub_cache(folder: Path, repo_id: str, cache_dir: Path) -> Path:
    """Lays a folder out as if the Hub's client had downloaded it."""
    repository = cache_dir / f"models--{repo_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    return Path(shutil.copytree(folder, repository / "snapshots" / COMMIT))


@pytest.fixture(scope="module")
def cpu_artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny(tiny_checkpoint, tmp_path_factory.mktemp("hub") / "artifact", target="cpu")


def generate(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 20)[None]
    return model.generate(ids, do_sample=False, max_new_tokens=5, eos_token_id=None, pad_token_id=0)


def test_compiled_graphs_from_the_hub_run_only_when_trusted(
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
    assert "its graphs come from the Hub, and are not trusted" in caplog.text


def links_to_a_snapshot(snapshot: Path, folder: Path) -> dict[str, str]:
    """Ways to name a snapshot of the Hub's cache."""
    repository, cache = snapshot.parents[1], snapshot.parents[2]
    (folder / "link").symlink_to(snapshot)
    (folder / "relative").symlink_to(os.path.relpath(snapshot, folder))
    (folder / "of_link").symlink_to(folder / "link")
    (folder / "moved").mkdir()
    inside = folder / "moved" / repository.name
    inside.symlink_to(folder / "elsewhere")
    (folder / "elsewhere").symlink_to(repository)
    (folder / "cache").symlink_to(cache)
    (folder / "files").mkdir()
    for path in snapshot.iterdir():
        (folder / "files" / path.name).symlink_to(path)
    (folder / "copied" / "graphs").mkdir(parents=True)
    for path in snapshot.rglob("*"):
        if path.is_file():
            (folder / "copied" / path.relative_to(snapshot)).parent.mkdir(exist_ok=True)
            (folder / "copied" / path.relative_to(snapshot)).symlink_to(path)
    shutil.copytree(snapshot, folder / "downloaded")
    metadata = folder / "downloaded" / ".cache" / "huggingface" / "download" / "neuron_config.json.metadata"
    metadata.parent.mkdir(parents=True)
    metadata.touch()
    return {
        "plain": str(snapshot),
        "slash": f"{snapshot}/",
        "dots": f"{snapshot}/../../snapshots/{snapshot.name}/.",
        "from the working folder": os.path.relpath(snapshot),
        "link": str(folder / "link"),
        "relative link": str(folder / "relative"),
        "link of a link": str(folder / "of_link"),
        "repository that is a link": str(inside / "snapshots" / snapshot.name),
        "cache that is a link": str(folder / "cache" / repository.name / "snapshots" / snapshot.name),
        "folder of links": str(folder / "files"),
        "copy of links": str(folder / "copied"),
        "downloaded into a folder": str(folder / "downloaded"),
    }


def test_a_snapshot_counts_as_from_the_hub_however_it_is_named(
    cpu_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = put_in_hub_cache(cpu_artifact, "someone/tiny", tmp_path / "anywhere")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    names = links_to_a_snapshot(snapshot, tmp_path / "own")
    options: dict[str, Any] = {"export": None, "native_code": False, "revision": None, "token": None}
    assert {way: is_from_hub(Path(name)) for way, name in names.items()} == dict.fromkeys(names, True)
    for way, name in names.items():
        if way in ("folder of links", "copy of links"):
            with pytest.raises(ValueError, match=r"is a link to .*, which is outside of the artifact"):
                find_artifact(name, **options)
        else:
            found = find_artifact(name, **options)
            assert found is not None and found[1], way
    local = find_artifact(cpu_artifact, **options)
    assert local is not None and not local[1]
    assert find_artifact(shutil.copytree(snapshot, tmp_path / "copy"), **options) is not None
    assert not is_from_hub(tmp_path / "copy")


def test_compiled_graphs_of_a_snapshot_that_is_named_by_its_folder_do_not_run(
    cpu_artifact: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = put_in_hub_cache(cpu_artifact, "someone/tiny", tmp_path)
    expected = generate(NeuronModelForCausalLM.from_pretrained(cpu_artifact))
    for code in (snapshot / "graphs").iterdir():
        code.write_bytes(b"hostile")
    (tmp_path / "link").symlink_to(snapshot)
    assert torch.equal(generate(NeuronModelForCausalLM.from_pretrained(tmp_path / "link")), expected)
    assert "its graphs come from the Hub, and are not trusted" in caplog.text


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    assert not is_from_hub(tmp_path / "one")
    with pytest.raises(OSError, match="one"):
        NeuronModelForCausalLM.from_pretrained(tmp_path / "one", export=False)


@pytest.mark.parametrize("named", ["artifact", "checkpoint", "file"])
def test_a_revision_of_a_local_path_is_refused(
    named: str, cpu_artifact: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").touch()
    path = {"artifact": cpu_artifact, "checkpoint": tiny_checkpoint, "file": tmp_path / "model.gguf"}[named]
    words = re.escape(
        f"revision='v1' names a state of a Hub repository, and {path} is a local path; leave --revision out"
    )
    with pytest.raises(ValueError, match=words):
        NeuronModelForCausalLM.from_pretrained(path, revision="v1")
    with pytest.raises(ValueError, match=words):
        export_model(path, tmp_path / "out", revision="v1")
    with pytest.raises(ValueError, match=words):
        find_config(path, revision="v1", token=None, trust_remote_code=False)


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
