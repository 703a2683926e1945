# SPDX-License-Identifier: Apache-2.0
"""Artifacts to a Hub on this machine's loopback and back: whole, by revision and token, offline; and each failure is one sentence."""

from __future__ import annotations

import copy
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from helpers import folder_bytes
from hub_server import REPO, TOKEN, Fault, LoopbackHub, connected_hub
from optimum.commands import optimum_cli
from transformers import GenerationConfig

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.artifact import find as finding
from optimum_neuron.artifact.artifact import Artifact, ArtifactError
from optimum_neuron.checkpoints import hub as hub_client
from optimum_neuron.hub.card import add_mark, is_unchanged
from optimum_neuron.hub.push import push_artifact


IDS = torch.arange(3, 20)[None]
OWN_CARD = "---\nlicense: mit\ntags:\n- mine\n---\nMy words.\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with connected_hub(monkeypatch) as found:
        found.exists, found.commits[:] = False, [{".gitattributes": b""}]
        yield found


@pytest.fixture(scope="module")
def artifact(cpu_artifact: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(cpu_artifact("llama"), tmp_path_factory.mktemp("pushed") / "tiny"))


@pytest.fixture(scope="module")
def model(artifact: Path) -> Any:
    return NeuronModelForCausalLM.from_pretrained(artifact)


def answer(model: Any) -> list[int]:
    return model.generate(IDS, do_sample=False, max_new_tokens=6, eos_token_id=None, pad_token_id=0)[0].tolist()


def load(cache: Path, **options: Any) -> Any:
    return NeuronModelForCausalLM.from_pretrained(REPO, cache_dir=cache, export=False, **options)


def find(cache: Path, **options: Any) -> Artifact:
    asked: dict[str, Any] = {"revision": None, "token": None, "native_code": False, "export": False}
    found = finding.find_artifact(REPO, cache_dir=cache, **asked | options)
    assert found is not None
    return found[0]


def test_what_is_pushed_answers_as_what_was_exported(
    model: Any, artifact: Path, hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    done = model.push_to_hub(REPO, private=True, token=TOKEN, commit_message="First", tags=["mine"])
    assert done.oid == hub.sha() and hub.private
    pushed = {name: data for name, data in hub.files.items() if name != ".gitattributes"}
    card = pushed.pop("README.md").decode()
    assert pushed == folder_bytes(artifact)
    assert is_unchanged(card) and "- mine\n" in card and f'from_pretrained("{REPO}")' in card
    hub.needs_token = True
    with pytest.raises(FileNotFoundError, match=r"org/compiled is neither a local path nor a Hub repository that can"):
        load(tmp_path / "nobody")
    trusted = load(tmp_path / "cache", token=TOKEN, trust_remote_code=True)
    assert answer(trusted) == answer(model) and "compiling" not in caplog.text
    careful = load(tmp_path / "careful", token=TOKEN)
    assert answer(careful) == answer(model) and "its graphs come from the Hub, and are not trusted" in caplog.text
    assert not list((tmp_path / "careful").rglob("graphs/*"))
    hub.requests.clear()
    assert answer(load(tmp_path / "cache", local_files_only=True, trust_remote_code=True)) == answer(model)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert answer(load(tmp_path / "cache", trust_remote_code=True)) == answer(model) and not hub.requests
    with pytest.raises(FileNotFoundError, match=r"the Hub cache \S+ does not have it"):
        load(tmp_path / "other")


def test_branches_commits_and_pull_requests_hold_what_was_pushed(model: Any, hub: LoopbackHub, tmp_path: Path) -> None:
    first = model.push_to_hub(REPO, token=TOKEN)
    changed = copy.copy(model)
    changed.generation_config = GenerationConfig(max_new_tokens=2, pad_token_id=0)
    second = changed.push_to_hub(REPO, token=TOKEN, revision="short")
    third = changed.push_to_hub(REPO, token=TOKEN, create_pr=True)
    assert third.pr_revision == "refs/pr/3" and hub.sha() == first.oid
    for revision, limit in (("short", 2), (second.oid, 2), (first.oid, None), ("refs/pr/3", 2), (None, None)):
        path = find(tmp_path, revision=revision).path / "generation_config.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        assert found.get("max_new_tokens") == limit, revision
    assert load(tmp_path, revision="short").generation_config.max_new_tokens == 2
    with pytest.raises(FileNotFoundError, match=r"org/compiled has no revision 'v9'; leave it out, or name a branch"):
        load(tmp_path, revision="v9")


def test_a_commit_is_whole_and_what_it_replaces_is_gone(artifact: Path, hub: LoopbackHub, tmp_path: Path) -> None:
    hub.exists = True
    hub.files.update({"graphs/old.json": b"{}", "weights/tp3.safetensors": b"x", "notes.txt": b"mine"})
    push_artifact(Artifact.open(artifact), REPO, token=TOKEN)
    assert len(hub.commits) == 2
    assert hub.files.keys() == {*folder_bytes(artifact), "README.md", ".gitattributes", "notes.txt"}
    hub.requests.clear()
    again = push_artifact(Artifact.open(artifact), REPO, token=TOKEN)
    assert not hub.asked("PUT", "/lfs/") and again.oid


def test_own_cards_stay(artifact: Path, hub: LoopbackHub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub.exists = True
    hub.files["README.md"] = OWN_CARD.encode()
    push_artifact(Artifact.open(artifact), REPO, token=TOKEN, tags=["mine", "neuron"])
    assert "a README.md that a person wrote or changed stays as it is; add tags" in caplog.text
    assert hub.files["README.md"].decode() == OWN_CARD
    own = Path(shutil.copytree(artifact, tmp_path / "own"))
    (own / "README.md").write_text("Only words.\n", encoding="utf-8")
    push_artifact(Artifact.open(own), REPO, token=TOKEN)
    assert hub.files["README.md"] == b"Only words.\n" == (own / "README.md").read_bytes()
    (own / "README.md").write_text(add_mark("made earlier"), encoding="utf-8")
    push_artifact(Artifact.open(own), REPO, token=TOKEN)
    assert hub.files["README.md"] == b"Only words.\n"  # and what was made and not changed since gives way
    hub.commits[-1]["README.md"] = add_mark("made earlier").encode()
    push_artifact(Artifact.open(own), REPO, token=TOKEN)
    assert is_unchanged(hub.files["README.md"].decode()) and b"## Sizes" in hub.files["README.md"]


def test_a_changed_file_is_refused_before_the_hub_is_asked(artifact: Path, hub: LoopbackHub, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(artifact, tmp_path / "broken"))
    weights = broken / "weights" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"model\.safetensors was changed after the export"):
        push_artifact(Artifact.open(broken), REPO, token=TOKEN)
    shutil.copy(artifact / "weights" / "model.safetensors", weights)
    (broken / "README.md").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"README\.md is no UTF-8 text"):
        push_artifact(Artifact.open(broken), REPO, token=TOKEN)
    assert not hub.requests


PUSHES = {
    "no token": (Fault("POST", "/api/repos/create", 401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
        r"the Hub does not take this token \(401\)"),
    "too many": (Fault("POST", "/commit/", 429, {"Retry-After": "7"}), r"too many requests \(429\); what was done stays, so run the command again in 7 s"),
    "an upload that fails": (Fault("PUT", "/lfs/", 500), r"the Hub fails with status 500"),
    "another writer": (Fault("POST", "/commit/", 412), r"was changed at the same time by another program"),
}  # fmt: skip


@pytest.mark.parametrize("name", PUSHES)
def test_a_failed_push_is_one_sentence_and_the_next_completes_it(artifact: Path, hub: LoopbackHub, name: str) -> None:
    fault, told = PUSHES[name]
    hub.faults = [fault]
    with pytest.raises(RuntimeError, match=told) as caught:
        push_artifact(Artifact.open(artifact), REPO, token=TOKEN)
    assert "\n" not in str(caught.value) and len(hub.commits) == 1
    hub.faults, sent = [], len(hub.objects)
    hub.requests.clear()
    push_artifact(Artifact.open(artifact), REPO, token=TOKEN)
    assert {*folder_bytes(artifact), "README.md", ".gitattributes"} == hub.files.keys()
    assert len(hub.asked("PUT", "/lfs/")) == len(hub.objects) - sent


def test_an_interrupted_push_says_that_the_command_continues_it(
    artifact: Path, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["optimum-cli", "neuron", "push", str(artifact), REPO, "--token", TOKEN])
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(huggingface_hub.HfApi, "create_commit", interrupt)
        optimum_cli.main()
    assert (ended.value.code, len(hub.commits)) == (130, 1)
    assert (
        capsys.readouterr().err == "interrupted; what was uploaded is not uploaded again, so run the command again\n"
    )
    optimum_cli.main()
    assert {*folder_bytes(artifact), "README.md", ".gitattributes"} == hub.files.keys()


def test_a_repository_stays_as_public_as_it_is_and_needs_a_token(artifact: Path, hub: LoopbackHub) -> None:
    hub.exists = True
    with pytest.raises(ValueError, match="org/compiled is there already, and is public, not private; name another"):
        push_artifact(Artifact.open(artifact), REPO, token=TOKEN, private=True)
    with pytest.raises(RuntimeError, match=r"\(401\), or got none; pass one as token \(--token\), or log in: hf auth"):
        push_artifact(Artifact.open(artifact), REPO, token=False)
    assert len(hub.commits) == 1


@pytest.fixture
def pushed(artifact: Path, hub: LoopbackHub) -> LoopbackHub:
    push_artifact(Artifact.open(artifact), REPO, token=TOKEN)
    hub.requests.clear()
    return hub


LOADS = {
    "no such name": (Fault("HEAD", "/resolve/", 404, {"X-Error-Code": "RepoNotFound"}), FileNotFoundError, r"is neither a local path nor a Hub repository"),
    "gated": (Fault("HEAD", "/resolve/", 403, {"X-Error-Code": "GatedRepo"}), RuntimeError, r"may not do that with org/compiled \(403\); ask for access"),
    "a list that fails": (Fault("GET", "/tree/", 503), RuntimeError, r"the Hub fails with status 503"),
    "a file that is cut": (Fault("GET", "weights/", 0), RuntimeError, r"the Hub cannot be reached|connection"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADS)
def test_a_failed_load_is_told_and_the_next_completes_it(pushed: LoopbackHub, name: str, tmp_path: Path) -> None:
    fault, kind, told = LOADS[name]
    pushed.faults = [fault]
    with pytest.raises(kind, match=told) as caught:
        find(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"the Hub cache .* (does not have it|has not all)|neither a folder"):
        find(tmp_path, local_files_only=True)
    pushed.faults = []
    assert find(tmp_path).manifest["target"] == "cpu"


def test_a_branch_is_read_of_one_commit(pushed: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = hub_client.download

    def push_after(*args: Any, **options: Any) -> Path:
        found = download(*args, **options)
        pushed.commits.append(dict.fromkeys(pushed.files, b"other"))
        return found

    monkeypatch.setattr(hub_client, "download", push_after)
    assert find(tmp_path).path.name == f"{len(pushed.commits) - 2:040x}"
