# SPDX-License-Identifier: Apache-2.0
"""The compile cache and a Hub repository: whole entries go both ways, broken ones neither, and each failure is one sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from cached import KEY, OTHER, Command, flip, move_away, store
from helpers import folder_bytes
from hub_server import REPO, TOKEN, Fault, LoopbackHub
from huggingface_hub import HfApi

from optimum_neuron.targets.cache.entries import list_entries, verify
from optimum_neuron.targets.cache.hub import sync
from optimum_neuron.targets.cache.store import CompileCache


ENTRY = f"neuron/{KEY}"


@pytest.fixture
def shared(hub: LoopbackHub, cache: CompileCache, folder: Path, monkeypatch: pytest.MonkeyPatch) -> CompileCache:
    """The empty cache of a machine, where another one has uploaded an entry."""
    store(cache, folder)
    assert sync(REPO, token=TOKEN).uploaded == [ENTRY]
    hub.requests.clear()
    move_away(monkeypatch)
    return CompileCache("neuron")


def test_entries_go_both_ways_in_whole_commits(
    hub: LoopbackHub, cache: CompileCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(cache, folder)
    store(CompileCache("cpu"), folder, OTHER)
    store(CompileCache("kernels"), folder, KEY)  # native code of a process: nobody else's
    done = sync(REPO, token=TOKEN)
    assert done.uploaded == [f"cpu/{OTHER}", ENTRY] and not done.downloaded and not done.refused
    assert len(hub.commits) == 2 and not [name for name in hub.files if "kernels" in name]
    files = {name.removeprefix(f"{ENTRY}/"): data for name, data in hub.files.items() if name.startswith(ENTRY)}
    assert files == folder_bytes(cache.folder / KEY)
    assert all(headers["authorization"] == f"Bearer {TOKEN}" for headers in hub.asked("POST", "/api/"))
    move_away(monkeypatch)
    other = CompileCache("neuron")
    store(other, folder, "2" * 64, b"mine")
    done = sync(REPO, token=TOKEN)
    assert done.downloaded == [f"cpu/{OTHER}", ENTRY] and done.uploaded == [f"neuron/{'2' * 64}"]
    assert folder_bytes(other.folder / KEY) == files and len(hub.commits) == 3
    assert other.fetch(KEY, folder, "graph", ".so") and list_entries()[0].about.target == "trn2"
    hub.requests.clear()
    assert sync(REPO, token=TOKEN).downloaded == [] and not hub.asked("GET", "resolve") and len(hub.commits) == 3
    assert not list(other.folder.glob(".*"))


def test_one_way_alone(shared: CompileCache, hub: LoopbackHub, folder: Path) -> None:
    store(shared, folder, OTHER)
    done = sync(REPO, upload=False)
    assert done.downloaded == [ENTRY] and not done.uploaded and not hub.asked("POST", "")
    shutil.rmtree(shared.folder / KEY)
    done = sync(REPO, token=TOKEN, download=False)
    assert done.uploaded == [f"neuron/{OTHER}"] and not (shared.folder / KEY).exists()


@pytest.mark.parametrize(
    ("file", "data", "told"),
    [
        ("code.so", b"hostile", "code.so is not what was stored"),
        ("code.constants", None, "code.constants: "),
        ("entry.json", b"[]", "entry.json: "),
        ("entry.json", b"{}", "names no files"),
        ("entry.json", json.dumps({"./../../x": "0" * 64}).encode(), "names no files"),
    ],
)
def test_what_is_not_what_its_record_says_does_not_enter_the_cache(
    shared: CompileCache, hub: LoopbackHub, file: str, data: bytes | None, told: str
) -> None:
    hub.commits.append({**hub.files, f"{ENTRY}/{file}": data or b""})
    if data is None:
        del hub.files[f"{ENTRY}/{file}"]
    # Beside it, names that are nothing of ours, and a file that nothing vouches for.
    whole = {name.replace(KEY, OTHER): content for name, content in hub.commits[1].items() if name.startswith(ENTRY)}
    others = dict.fromkeys(("neuron/../../evil/entry.json", f"x/{KEY}/entry.json"), b"{}")
    hub.files.update(whole | others | {f"neuron/{OTHER}/code.extra": b"x"})
    done = sync(REPO, upload=False)
    assert done.downloaded == [f"neuron/{OTHER}"] and list(done.refused) == [ENTRY] and told in done.refused[ENTRY]
    assert [path.name for path in shared.folder.iterdir()] == [OTHER]
    assert not (shared.folder / OTHER / "code.extra").exists()


def test_broken_entries_are_not_uploaded_and_whole_ones_are(
    hub: LoopbackHub, cache: CompileCache, folder: Path, command: Command
) -> None:
    flip(store(cache, folder) / "code.so")
    store(cache, folder, OTHER)
    code, out, _ = command("sync", "--repo", REPO, "--token", TOKEN)
    assert code == 1 and f"{ENTRY} is broken, and was not taken: code.so is not what was stored" in out
    assert out.endswith(f"{REPO}: 0 downloaded, 1 uploaded, 1 broken\n")
    assert not [name for name in hub.files if KEY in name] and f"neuron/{OTHER}/code.so" in hub.files


def test_a_download_that_is_cut_goes_on_where_it_was(
    shared: CompileCache, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 500)
    hub.faults = [Fault("GET", "code.so", 0, times=2)]
    assert sync(REPO, upload=False).downloaded == [ENTRY]
    ranges = [headers.get("range") for headers in hub.asked("GET", "code.so")]
    assert ranges == [None, "bytes=2000-", "bytes=3000-"]


TOKEN_REFUSED = (
    r"the Hub does not take this token \(401\), or got none; pass one as token \(--token\), or log in: hf auth login"
)
NO_REPOSITORY = r"org/compiled is no Hub repository that can be read; check the name, pass token \(--token\), or make it first: hf repo create"
NOT_WRITABLE = r"\(403\); ask for access, or pass a token \(--token\) that allows it, or --download-only"
LATER = r"too many requests \(429\); what was done stays, so run the command again in 7 s"
REFUSED = r"the Hub refuses with status 400: .*; check the repository's name, the revision and the token"
FAULTS = {
    "no token": (Fault("GET", "/revision/", 401, {"X-Error-Message": "Invalid credentials in Authorization header"}), TOKEN_REFUSED),
    "no repository": (Fault("GET", "/revision/", 404, {"X-Error-Code": "RepoNotFound"}), NO_REPOSITORY),
    "hidden repository": (Fault("GET", "/revision/", 401, {"X-Error-Code": "RepoNotFound"}), NO_REPOSITORY),
    "not to be read": (Fault("GET", "code.so", 403), r"this token may not do that with org/compiled \(403\)"),
    "not to be written": (Fault("POST", "/preupload/", 403), NOT_WRITABLE),
    "too many requests": (Fault("GET", "/tree/", 429, {"Retry-After": "7"}), LATER),
    "a server that fails": (Fault("GET", "/tree/", 503), r"the Hub fails with status 503; what was done stays, so run the command again later"),
    "another writer": (Fault("POST", "/commit/", 412), r"was changed at the same time by another program \(412\); what was done stays"),
    "a bad request": (Fault("POST", "/preupload/", 400), REFUSED),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_failure_of_the_hub_is_one_sentence_and_leaves_nothing(
    shared: CompileCache, hub: LoopbackHub, folder: Path, name: str, command: Command
) -> None:
    fault, told = FAULTS[name]
    hub.faults = [fault]
    store(shared, folder, OTHER, b"mine")
    code, out, err = command("sync", "--repo", REPO, "--token", TOKEN)
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 1 and out == "" and re.search(told, line), err
    assert not list(shared.folder.glob(".*")) and len(hub.commits) == 2
    hub.faults = []
    done = sync(REPO, token=TOKEN)  # what was done stays, and the rest is done now
    assert done.uploaded == [f"neuron/{OTHER}"] and (shared.folder / KEY).exists()


def test_a_hub_that_is_busy_for_a_while_is_waited_for(
    shared: CompileCache, hub: LoopbackHub, folder: Path, waits: list[float]
) -> None:
    busy = ("/revision/", "/tree/", "code.so")
    hub.faults = [Fault("GET", each, 429, {"Retry-After": "7"}, times=1) for each in busy]
    hub.faults += [Fault("POST", "/commit/", 503, times=2), Fault("PUT", "/lfs/", 502, times=1)]
    store(shared, folder, OTHER, b"mine")
    done = sync(REPO, token=TOKEN)
    assert done.downloaded == [ENTRY] and done.uploaded == [f"neuron/{OTHER}"]
    assert sum(7 <= wait <= 8 for wait in waits) == 3 and not any(each.times for each in hub.faults)


def test_a_hub_that_cannot_be_reached_or_must_not_be_asked(
    hub: LoopbackHub, cache: CompileCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(cache, folder)
    with pytest.raises(ValueError, match=r"'no such name!' is no name of a Hub repository; name it as in org/name"):
        sync("no such name!")
    with pytest.raises(FileNotFoundError, match=r"org/compiled has no revision 'v9'; leave it out, or name a b"):
        sync(REPO, revision="v9")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match=r"the Hub cannot be reached \(.*refused.*\); check the connection"):
        sync(REPO)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    with pytest.raises(RuntimeError, match=r"HF_HUB_OFFLINE is set, so the Hub is not asked; unset it to reach org"):
        sync(REPO)


def test_an_entry_that_is_removed_while_it_is_uploaded_is_sent_whole(
    hub: LoopbackHub, cache: CompileCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, commit = folder_bytes(store(cache, folder)), HfApi.create_commit

    def remove_first(*arguments: Any, **options: Any) -> Any:
        shutil.rmtree(cache.folder / KEY)
        return commit(*arguments, **options)

    monkeypatch.setattr(HfApi, "create_commit", remove_first)
    assert sync(REPO, token=TOKEN).uploaded == [ENTRY]
    assert {name: hub.files[f"{ENTRY}/{name}"] for name in before} == before


MOMENTS = [(HfApi, "hf_hub_download"), (Path, "rename"), (CompileCache, "admit"), (HfApi, "create_commit")]


@pytest.mark.parametrize(("owner", "step"), MOMENTS)
def test_a_sync_that_is_killed_leaves_whole_entries_and_the_next_one_does_the_rest(
    owner: Any, step: str, shared: CompileCache, hub: LoopbackHub, folder: Path
) -> None:
    theirs = {name.removeprefix(f"{ENTRY}/"): data for name, data in hub.files.items() if name.startswith(ENTRY)}
    ours = folder_bytes(store(shared, folder, OTHER))
    huggingface_hub.close_session()
    pid = os.fork()
    if pid == 0:
        setattr(owner, step, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        sync(REPO, token=TOKEN)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    has_theirs = step == "create_commit"
    whole = {entry.path.name: problem for entry, problem in verify(remove=False)}
    assert whole == dict.fromkeys([OTHER, KEY] if has_theirs else [OTHER])
    assert not [name for name in hub.files if OTHER in name]
    done = sync(REPO, token=TOKEN)
    assert done.downloaded == ([] if has_theirs else [ENTRY]) and done.uploaded == [f"neuron/{OTHER}"]
    assert {path.name: folder_bytes(path) for path in shared.folder.iterdir()} == {OTHER: ours, KEY: theirs}
