# SPDX-License-Identifier: Apache-2.0
"""Artifacts and checkpoints from the Hub and its cache: only what is needed is downloaded, and code runs only when trusted."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from gguf_files import write_gguf
from helpers import export_tiny
from hub_server import REPO, LoopbackHub, connected_hub, put_in_hub_cache
from transformers import AutoModelForCausalLM

from optimum_neuron import NeuronConfig, NeuronModelForCausalLM, export_model
from optimum_neuron.artifact.find import find_artifact, is_from_hub
from optimum_neuron.checkpoints import hub as downloads
from optimum_neuron.checkpoints.find import find_checkpoint
from optimum_neuron.checkpoints.hub import hub_file


SIZES: dict[str, Any] = {"sequence_length": 64, "prefill_chunk_size": 8, "target": "eager"}


@pytest.fixture(scope="module")
def cpu_artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny(tiny_checkpoint, tmp_path_factory.mktemp("hub") / "artifact", target="cpu")


def generate(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 20)[None]
    return model.generate(ids, do_sample=False, max_new_tokens=5, eos_token_id=None, pad_token_id=0)


def test_trusted_graphs_of_the_hub_run(cpu_artifact: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    snapshot = put_in_hub_cache(cpu_artifact, "someone/tiny", tmp_path)
    expected = generate(NeuronModelForCausalLM.from_pretrained(cpu_artifact))
    trusting = NeuronModelForCausalLM.from_pretrained("someone/tiny", cache_dir=tmp_path, trust_remote_code=True)
    assert torch.equal(generate(trusting), expected)
    assert "compiling" not in caplog.text
    for code in (snapshot / "graphs").iterdir():
        code.write_bytes(b"hostile")
    (tmp_path / "link").symlink_to(snapshot)
    for careful in (tmp_path / "link", "someone/tiny"):
        assert torch.equal(generate(NeuronModelForCausalLM.from_pretrained(careful, cache_dir=tmp_path)), expected)
    assert caplog.text.count("its graphs come from the Hub, and are not trusted") == 2
    shutil.rmtree(snapshot / "graphs")
    assert torch.equal(generate(NeuronModelForCausalLM.from_pretrained("someone/tiny", cache_dir=tmp_path)), expected)


def links_to_a_snapshot(snapshot: Path, folder: Path) -> dict[str, str]:
    repository = snapshot.parents[1]
    (folder / "link").symlink_to(os.path.relpath(snapshot, folder))
    (folder / "of_link").symlink_to(folder / "link")
    (folder / "elsewhere").symlink_to(repository)
    (folder / "moved").mkdir()
    (folder / "moved" / repository.name).symlink_to(folder / "elsewhere")
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
        "dots": f"{snapshot}/../../snapshots/{snapshot.name}/.",
        "from the working folder": os.path.relpath(snapshot),
        "link of a link": str(folder / "of_link"),
        "repository that is a link": str(folder / "moved" / repository.name / "snapshots" / snapshot.name),
        "copy of links": str(folder / "copied"),
        "downloaded into a folder": str(folder / "downloaded"),
    }


def test_a_snapshot_is_known_by_any_name(cpu_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = put_in_hub_cache(cpu_artifact, "someone/tiny", tmp_path / "anywhere")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    names = links_to_a_snapshot(snapshot, tmp_path / "own")
    options: dict[str, Any] = {"export": None, "native_code": False, "revision": None, "token": None}
    assert {way: is_from_hub(Path(name)) for way, name in names.items()} == dict.fromkeys(names, True)
    for way, name in names.items():
        if way == "copy of links":
            with pytest.raises(ValueError, match=r"is a link to .*, which is outside of the artifact"):
                find_artifact(name, **options)
        else:
            found = find_artifact(name, **options)
            assert found is not None and found[1], way
    local = find_artifact(cpu_artifact, **options)
    assert local is not None and not local[1]
    assert find_artifact(shutil.copytree(snapshot, tmp_path / "copy"), **options) is not None
    assert not is_from_hub(tmp_path / "copy")


def test_a_circle_of_links_and_a_revision_of_a_folder_are_refused(cpu_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    assert not is_from_hub(tmp_path / "one")
    with pytest.raises(OSError, match="one"):
        NeuronModelForCausalLM.from_pretrained(tmp_path / "one", export=False)
    with pytest.raises(ValueError, match=r"revision='v1' names a state of a Hub repository, and .* is a local path"):
        NeuronModelForCausalLM.from_pretrained(cpu_artifact, revision="v1")


def test_a_hub_checkpoint_is_exported(tiny_checkpoint: Path, tmp_path: Path) -> None:
    put_in_hub_cache(tiny_checkpoint, "someone/plain", tmp_path)
    model = NeuronModelForCausalLM.from_pretrained("someone/plain", cache_dir=tmp_path, **SIZES)
    assert model.artifact.manifest["source"] == "someone/plain"
    with pytest.raises(FileNotFoundError, match=r"neither a folder nor a Hub repository with neuron_config\.json"):
        NeuronModelForCausalLM.from_pretrained("someone/plain", cache_dir=tmp_path, export=False)


ANOTHERS = ("consolidated.safetensors", "original/model.safetensors", "model.fp16.safetensors", "pytorch_model.bin")
OPTIONS: dict[str, Any] = {"revision": None, "token": None, "trust_remote_code": False}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with connected_hub(monkeypatch) as found:
        found.commits = [dict.fromkeys(ANOTHERS, b"never read")]
        yield found


def put(hub: LoopbackHub, folder: Path) -> None:
    hub.files.update({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})


def weights_in(folder: Path) -> set[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    return {name for name in found if name.endswith((".safetensors", ".bin", ".gguf"))}


def test_only_weights_that_are_read_are_downloaded(hub: LoopbackHub, tiny_checkpoint: Path, tmp_path: Path) -> None:
    put(hub, tiny_checkpoint)
    found = find_checkpoint(REPO, cache_dir=tmp_path / "one", **OPTIONS)
    assert weights_in(found.folder) == {"model.safetensors"} and (found.folder / "tokenizer.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    model.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    del hub.files["model.safetensors"]
    put(hub, tmp_path / "parts")
    named = set(json.loads(hub.files["model.safetensors.index.json"])["weight_map"].values())
    found = find_checkpoint(REPO, cache_dir=tmp_path / "cache", **OPTIONS)
    assert len(named) > 1 and weights_in(found.folder) == named
    again = find_checkpoint(REPO, cache_dir=tmp_path / "cache", local_files_only=True, **OPTIONS)
    assert again.load_model("float32").num_parameters() == model.num_parameters()


def test_where_gguf_files_are_many_they_are_named_and_how_to_choose_one(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ValueError, match=rf"name one of them, as {tmp_path}/m\.gguf; it has m\.gguf$"):
        find_checkpoint(tmp_path, **OPTIONS)
    hub.commits = [{"README.md": b"", "m-Q8_0.gguf": b"", "big/m-Q4_0.gguf": b"", "m-\x1b[2J.gguf": b""}]
    told = f"{REPO} holds GGUF files; name one of them, as {REPO}:big/m-Q4_0.gguf; it has big/m-Q4_0.gguf, m-Q8_0.gguf"
    for described in ({}, {"config.json": b'{"model_type": "llama"}'}):
        hub.commits = [hub.files | described]
        with pytest.raises(ValueError, match=f"{re.escape(told)}$"):
            find_checkpoint(REPO, cache_dir=tmp_path / str(len(described)), **OPTIONS)
    for name in ("m-Q9_0.gguf", "Q4_0"):
        with pytest.raises(ValueError, match=f"{REPO} has no GGUF file {name}; name one of them, as {REPO}:big/m-Q"):
            find_checkpoint(f"{REPO}:{name}", weights=False, **OPTIONS)


def test_a_repository_without_readable_weights_says_what_it_has(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.files["config.json"] = b'{"model_type": "llama"}'
    with pytest.raises(ValueError, match=f"{REPO} holds its weights as pytorch_model.bin, a format that may run code"):
        find_checkpoint(REPO, cache_dir=tmp_path, **OPTIONS)
    del hub.files["pytorch_model.bin"]
    for name in (REPO, f"{REPO}:m.gguf"):
        with pytest.raises(FileNotFoundError, match=r"holds no weights: .*; it has consolidated\.safetensors, model"):
            find_checkpoint(name, cache_dir=tmp_path, **OPTIONS)
    del hub.files["config.json"]
    with pytest.raises(FileNotFoundError, match=f"{REPO} holds no config.json"):
        find_checkpoint(REPO, cache_dir=tmp_path / "anew", **OPTIONS)


def test_a_gguf_file_of_a_repository_is_exported(hub: LoopbackHub, tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_gguf(tiny_checkpoint, tmp_path / "m.gguf", "Q8_0")
    card = b"---\nlicense: mit\n---\n"
    hub.commits = [{"README.md": card, "sub/m-Q8_0.gguf": (tmp_path / "m.gguf").read_bytes(), "m-F16.gguf": b"big"}]
    hub.branches["v1"] = 1
    name = f"{REPO}:sub/m-Q8_0.gguf"
    exported = export_model(name, tmp_path / "out", config=NeuronConfig(**SIZES), revision="v1")
    manifest = json.loads((exported / "neuron_config.json").read_text())
    assert manifest["source"] == name
    assert manifest["origin"] == {"repo": REPO, "revision": f"{1:040x}", "license": "mit"}
    assert not hub.asked("GET", "F16")
    made = NeuronModelForCausalLM.from_pretrained(name, revision="v1", **SIZES)
    assert torch.equal(generate(NeuronModelForCausalLM.from_pretrained(exported)), generate(made))


def test_names_of_repository_files_are_told_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_file("org/repo:sub/m.gguf") == ("org/repo", "sub/m.gguf")
    assert hub_file("gpt2:m.gguf") == ("gpt2", "m.gguf")
    others = ["org/repo", "m.gguf", "a/b/c:m.gguf", "./a:m.gguf", "/a:m.gguf", "https://org/repo/m.gguf", "org/repo:"]
    assert not any(map(hub_file, [*others, ":m.gguf", "C:m.gguf", r"C:\m.gguf"]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "repo:m.gguf").touch()
    assert hub_file("org/repo:m.gguf") is None


@pytest.mark.parametrize("answers", [False, None], ids=["refused", "silent"])
def test_a_hub_that_cannot_be_reached_is_asked_once_and_what_is_in_the_cache_is_found(
    answers: bool | None, hub: LoopbackHub, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(hub, tiny_checkpoint)
    known = find_checkpoint(REPO, cache_dir=tmp_path, **OPTIONS).folder
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits to ask again"))
    monkeypatch.setattr(downloads, "_PATIENCE", 0.2)
    with socket.socket() as nothing:
        nothing.bind(("127.0.0.1", 0))
        if answers is None:
            nothing.listen()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{nothing.getsockname()[1]}")
        assert find_checkpoint(REPO, cache_dir=tmp_path, **OPTIONS).folder == known
        words = rf"org/misspelt is no local path, the Hub cache {tmp_path} does not have it, and the Hub cannot be reached \(.+\); check"
        find_any = partial(find_artifact, export=None, native_code=False, revision=None, token=None)
        for find in (partial(find_checkpoint, **OPTIONS), find_any):
            with pytest.raises(FileNotFoundError, match=words):
                find("org/misspelt", cache_dir=tmp_path)
        (known / "tokenizer.json").unlink()
        with pytest.raises(FileNotFoundError, match=f"the Hub cache {tmp_path} has not all of its files, and the Hub"):
            find_checkpoint(REPO, cache_dir=tmp_path, **OPTIONS)
