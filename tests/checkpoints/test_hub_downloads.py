# SPDX-License-Identifier: Apache-2.0
"""What is downloaded of a checkpoint's Hub repository: the weights that an export reads, and no others."""

from __future__ import annotations

import json
import re
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
from hub_server import REPO, LoopbackHub, connected_hub
from transformers import AutoModelForCausalLM

from optimum_neuron import NeuronConfig, NeuronModelForCausalLM, export_model
from optimum_neuron.artifact.find import find_artifact
from optimum_neuron.checkpoints import hub as downloads
from optimum_neuron.checkpoints.find import find_checkpoint, find_config
from optimum_neuron.checkpoints.hub import HubFile, hub_file


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


def test_one_file_of_weights_is_all_that_is_downloaded(
    hub: LoopbackHub, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    put(hub, tiny_checkpoint)
    found = find_checkpoint(REPO, cache_dir=tmp_path, **OPTIONS)
    assert weights_in(found.folder) == {"model.safetensors"}
    assert (found.folder / "tokenizer.json").is_file()


def test_of_several_files_those_are_downloaded_that_the_index_names(
    hub: LoopbackHub, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    model.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    put(hub, tmp_path / "parts")
    named = set(json.loads(hub.files["model.safetensors.index.json"])["weight_map"].values())
    assert len(named) > 1
    found = find_checkpoint(REPO, cache_dir=tmp_path / "cache", **OPTIONS)
    assert weights_in(found.folder) == named
    again = find_checkpoint(REPO, cache_dir=tmp_path / "cache", local_files_only=True, **OPTIONS)
    assert again.load_model("float32").num_parameters() == model.num_parameters()


def test_a_repository_of_gguf_files_names_them_and_how_to_choose_one(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.commits = [{"README.md": b"", "m-Q8_0.gguf": b"", "big/m-Q4_0.gguf": b"", "m-\x1b[2J.gguf": b""}]
    words = (
        f"{REPO} holds GGUF files; name one of them, as {REPO}:big/m-Q4_0.gguf; it has big/m-Q4_0.gguf, m-Q8_0.gguf"
    )
    with pytest.raises(ValueError, match=f"{re.escape(words)}$"):
        find_checkpoint(REPO, cache_dir=tmp_path, **OPTIONS)
    hub.commits = [hub.files | {"config.json": b'{"model_type": "llama"}'}]
    with pytest.raises(ValueError, match=f"{re.escape(words)}$"):
        find_checkpoint(REPO, cache_dir=tmp_path / "described", **OPTIONS)
    for name in ("m-Q9_0.gguf", "Q4_0"):
        with pytest.raises(
            ValueError, match=f"{REPO} has no GGUF file {name}; name one of them, as {REPO}:big/m-Q4_0"
        ):
            find_config(f"{REPO}:{name}", **OPTIONS)


def test_a_folder_of_gguf_files_names_them(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ValueError, match=rf"name one of them, as {tmp_path}/m\.gguf; it has m\.gguf$"):
        find_checkpoint(tmp_path, **OPTIONS)


def test_a_repository_without_readable_weights_says_what_it_has(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.files["config.json"] = b'{"model_type": "llama"}'
    with pytest.raises(ValueError, match=f"{REPO} holds its weights as pytorch_model.bin, a format that may run code"):
        find_checkpoint(REPO, cache_dir=tmp_path, **OPTIONS)
    del hub.files["pytorch_model.bin"]
    with pytest.raises(
        FileNotFoundError, match=r"holds no weights: .*; it has consolidated\.safetensors, model\.fp16"
    ):
        find_checkpoint(REPO, cache_dir=tmp_path, **OPTIONS)
    with pytest.raises(FileNotFoundError, match=r"holds no weights: .*; it has consolidated"):
        find_checkpoint(f"{REPO}:m.gguf", cache_dir=tmp_path, **OPTIONS)
    del hub.files["config.json"]
    with pytest.raises(FileNotFoundError, match=f"{REPO} holds no config.json"):
        find_checkpoint(REPO, cache_dir=tmp_path / "anew", **OPTIONS)


def test_a_gguf_file_of_a_repository_is_exported_without_the_others(
    hub: LoopbackHub, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    write_gguf(tiny_checkpoint, tmp_path / "m.gguf", "Q8_0")
    card = b"---\nlicense: mit\n---\n"
    hub.commits = [{"README.md": card, "sub/m-Q8_0.gguf": (tmp_path / "m.gguf").read_bytes(), "m-F16.gguf": b"big"}]
    hub.branches["v1"] = 1
    name = f"{REPO}:sub/m-Q8_0.gguf"
    config = NeuronConfig(sequence_length=64, prefill_chunk_size=8, target="eager")
    exported = export_model(name, tmp_path / "out", config=config, revision="v1")
    manifest = json.loads((exported / "neuron_config.json").read_text())
    assert manifest["source"] == name
    assert manifest["origin"] == {"repo": REPO, "revision": f"{1:040x}", "license": "mit"}
    assert not hub.asked("GET", "F16")
    sizes: dict[str, Any] = {"sequence_length": 64, "prefill_chunk_size": 8, "target": "eager"}
    loaded = NeuronModelForCausalLM.from_pretrained(exported)
    made = NeuronModelForCausalLM.from_pretrained(name, revision="v1", **sizes)
    ids = torch.arange(3, 20)[None]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(loaded.generate(ids, **options), made.generate(ids, **options))


def test_names_of_repository_files_are_told_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_file("org/repo:sub/m.gguf") == HubFile("org/repo", "sub/m.gguf")
    assert hub_file("gpt2:m.gguf") == HubFile("gpt2", "m.gguf")
    others = [
        "org/repo",
        "m.gguf",
        "a/b/c:m.gguf",
        "./a:m.gguf",
        "/a:m.gguf",
        "https://org/repo/m.gguf",
        "org/repo:",
        ":m.gguf",
        "C:m.gguf",
        r"C:\m.gguf",
    ]
    assert [name for name in others if hub_file(name) is not None] == []
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
