# SPDX-License-Identifier: Apache-2.0
"""Weights are hashed once per file, and whoever writes to a file has it hashed again; without a cache, each load hashes."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import shutil
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import weights_of
from tampering import flipped
from writing import write_tensors

from optimum_neuron.artifact import filesystem, user_cache, weights
from optimum_neuron.artifact.artifact import WEIGHTS_NAME, Artifact, ArtifactError
from optimum_neuron.artifact.user_cache import CACHE_VARIABLE
from optimum_neuron.artifact.weights import read_weights


SETTLED_NS = 20_000_000  # in place of seconds, and above the tick of the system's clock
TENSORS = {"model.a": torch.arange(4096.0), "model.b": torch.ones(5, dtype=torch.bfloat16)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where records are; a file settles at once."""
    monkeypatch.setattr(weights, "_LARGEST_COPY", 0)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(user_cache, "_SETTLED_NS", SETTLED_NS)
    monkeypatch.setattr(weights, "is_local", lambda descriptor: True)  # wherever the tests' files are
    return tmp_path / "cache" / user_cache.VERIFIED_KIND


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what was hashed."""
    sizes: list[int] = []

    def sha256(content: mmap.mmap) -> object:
        sizes.append(len(content))
        return hashlib.sha256(content)

    monkeypatch.setattr(user_cache, "hashlib", types.SimpleNamespace(sha256=sha256))
    return sizes


@pytest.fixture
def artifact(tmp_path: Path, cache: Path) -> Artifact:
    made = write_tensors(tmp_path / "artifact", TENSORS)
    settle()
    return made


def settle() -> None:
    time.sleep(2 * SETTLED_NS / 1e9)


def check(artifact: Artifact) -> None:
    """Loads an artifact, whose weights are what was written."""
    found = weights_of(artifact)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], value) for name, value in TENSORS.items())


def write_in_place(path: Path) -> None:
    path.write_bytes(flipped(path.read_bytes()))


def write_and_restore_times(path: Path) -> None:
    before = path.stat()
    write_in_place(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_a_copy(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(flipped(path.read_bytes()))
    shutil.copystat(path, copy)
    copy.rename(path)


def write_through_a_mapping(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:] = flipped(memory[:])
        memory.flush()


CHANGES = [write_in_place, write_and_restore_times, replace_by_a_copy, write_through_a_mapping]


@pytest.mark.parametrize("largest_copy", [0, 1 << 30], ids=["mapped", "copied"])
def test_a_file_is_hashed_once(
    artifact: Artifact, hashed: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch, largest_copy: int
) -> None:
    monkeypatch.setattr(weights, "_LARGEST_COPY", largest_copy)
    for _ in range(3):
        check(artifact)
    assert hashed == [(artifact.path / WEIGHTS_NAME).stat().st_size]
    (record,) = cache.iterdir()
    assert record.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_file_that_was_changed_after_it_was_hashed_is_refused(
    artifact: Artifact, hashed: list[int], change: Callable[[Path], None]
) -> None:
    path = artifact.path / WEIGHTS_NAME
    check(artifact)
    change(path)
    for _ in range(2):
        settle()
        with pytest.raises(ArtifactError, match=r"model\.safetensors was changed after the export: its sha256 is"):
            read_weights(artifact)
    write_in_place(path)
    check(artifact)
    assert len(hashed) == 4


def test_a_record_of_one_artifact_says_nothing_of_another(artifact: Artifact, hashed: list[int]) -> None:
    check(artifact)
    entry = {"sha256": "0" * 64, "size": 0}
    with pytest.raises(ArtifactError, match=r"the manifest says 000000000000…"):
        read_weights(Artifact(artifact.path, artifact.manifest | {"files": {WEIGHTS_NAME: entry}}))
    check(artifact)
    assert len(hashed) == 2


def test_a_file_that_was_just_written_is_hashed_again(
    artifact: Artifact, hashed: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ctime of a second write may be the same."""
    monkeypatch.setattr(user_cache, "_SETTLED_NS", 10**18)
    check(artifact)
    check(artifact)
    assert len(hashed) == 2
    assert not any(cache.iterdir())


def test_a_file_that_changes_while_it_or_its_record_is_read_is_hashed_again(
    artifact: Artifact, hashed: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_before(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (os.utime(artifact.path / WEIGHTS_NAME), function(*given))[1]

    with monkeypatch.context() as patch:
        patch.setattr(user_cache, "hashlib", types.SimpleNamespace(sha256=change_before(user_cache.hashlib.sha256)))
        check(artifact)
        assert not any(cache.iterdir())
    settle()
    check(artifact)
    monkeypatch.setattr(user_cache, "_has_record", change_before(user_cache._has_record))
    check(artifact)
    assert len(hashed) == 3


def link(record: Path) -> None:
    record.rename(record.parent.parent / "elsewhere")
    record.symlink_to(record.parent.parent / "elsewhere")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda record: record.write_text(""),
    "cut": lambda record: record.write_text(record.read_text()[:40]),
    "a list": lambda record: record.write_text("[]"),
    "no text": lambda record: record.write_bytes(b"\xff\xfe"),
    "nested": lambda record: record.write_text("[" * 100_000),
    "another size": lambda record: record.write_text(json.dumps(json.loads(record.read_text()) | {"size": 3})),
    "writable by others": lambda record: record.chmod(0o622),
    "a link": link,
} | ({"of another user": lambda record: os.chown(record, 12345, 0)} if os.geteuid() == 0 else {})


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_record_that_is_broken_or_foreign_is_made_again(
    artifact: Artifact, hashed: list[int], cache: Path, damage: str
) -> None:
    check(artifact)
    DAMAGES[damage](next(cache.iterdir()))
    check(artifact)
    check(artifact)
    assert len(hashed) == 2


def full_disk(*args: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


SPOILED: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "a file": lambda cache, patch: (cache.rmdir(), cache.touch()),
    "open to all": lambda cache, patch: cache.chmod(0o777),
    "read-only": lambda cache, patch: patch.setattr(filesystem.tempfile, "mkstemp", full_disk),
    "full": lambda cache, patch: patch.setattr(filesystem.os, "replace", full_disk),
}


@pytest.mark.parametrize("how", SPOILED)
def test_without_a_cache_each_load_hashes(
    artifact: Artifact, hashed: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    cache.mkdir(parents=True, mode=0o700)
    SPOILED[how](cache, monkeypatch)
    check(artifact)
    check(artifact)
    assert len(hashed) == 2
    assert not cache.is_dir() or not any(cache.iterdir())
    write_in_place(artifact.path / WEIGHTS_NAME)
    with pytest.raises(ArtifactError, match="was changed after the export"):
        read_weights(artifact)


def test_the_oldest_records_make_room(
    tmp_path: Path, hashed: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_cache, "_MOST_RECORDS", 3)
    cache.mkdir(parents=True, mode=0o700)
    (cache / "unfinished").touch()
    os.utime(cache / "unfinished", (0, 0))
    artifacts = [write_tensors(tmp_path / str(number), TENSORS) for number in range(5)]
    settle()
    for artifact in artifacts:
        check(artifact)
    assert len(hashed) == 5
    assert len(list(cache.iterdir())) == 3
    for artifact in artifacts[-3:]:
        check(artifact)
    assert len(hashed) == 5
