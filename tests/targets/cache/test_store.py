# SPDX-License-Identifier: Apache-2.0
"""The compile cache: what is broken is compiled again, what is not ours is not used, any number may work at once, and who was used last stays."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from cached import KEY, OTHER, flip, store, used
from helpers import folder_bytes

from optimum_neuron.artifact.user_cache import cache_folder
from optimum_neuron.targets.cache import entries as entries_module
from optimum_neuron.targets.cache.entries import SIZE_VARIABLE, CacheEntry, list_entries, prune
from optimum_neuron.targets.cache.store import CompileCache
from optimum_neuron.targets.cache.units import parse_age, parse_size


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def test_an_entry_is_given_as_it_was_stored_first(cache: CompileCache, folder: Path) -> None:
    assert not cache.fetch(KEY, folder, "graph", ".so")
    store(cache, folder)
    stored = folder_bytes(folder)
    assert stored == {"graph.so": b"code" * 1000, "graph.constants": b"constants"}
    empty(folder)
    assert cache.fetch(KEY, folder, "graph", ".so") and folder_bytes(folder) == stored
    assert cache.fetch(KEY, folder, "other", ".so") and (folder / "other.so").is_file()
    assert not cache.fetch(OTHER, folder, "graph", ".so")
    store(cache, folder, code=b"second")
    assert (folder / "graph.so").read_bytes() == b"second" * 1000  # each export has what it compiled
    assert cache.fetch(KEY, folder, "graph", ".so") and (folder / "graph.so").read_bytes() == b"code" * 1000
    assert [path.name for path in cache.folder.iterdir()] == [KEY]


def recorded(text: str) -> Callable[[Path], object]:
    return lambda entry: (entry / "entry.json").write_text(text, encoding="utf-8")


def linked(entry: Path) -> None:
    (entry / "code.so").rename(entry.parent / "elsewhere")
    (entry / "code.so").symlink_to(entry.parent / "elsewhere")


def led_elsewhere(entry: Path) -> None:
    (entry / "code.").mkdir()
    recorded(json.dumps({"./../entry.json": "0" * 64, ".so": "0" * 64}))(entry)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda entry: flip(entry / "code.so"),
    "half a file": lambda entry: os.truncate(entry / "code.so", 2000),
    "no code": lambda entry: (entry / "code.so").unlink(),
    "a folder for code": lambda entry: ((entry / "code.so").unlink(), (entry / "code.so").mkdir()),
    "code that is a link": linked,
    "code that others may write": lambda entry: (entry / "code.so").chmod(0o666),
    "a record that the group may write": lambda entry: (entry / "entry.json").chmod(0o660),
    "a folder that others may write": lambda entry: entry.chmod(0o777),
    "no record": lambda entry: (entry / "entry.json").unlink(),
    "an empty record": recorded(""),
    "a record without digests": recorded(json.dumps({".so": 3})),
    "a record without the code": recorded("{}"),
    "a record that leads elsewhere": led_elsewhere,
    "nothing": lambda entry: (shutil.rmtree(entry), entry.mkdir(mode=0o700)),
} | ({"code of somebody else": lambda entry: os.chown(entry / "code.so", 12345, 0)} if os.geteuid() == 0 else {})


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_entry_is_not_used_and_replaced(
    cache: CompileCache, folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    entry = store(cache, folder)
    empty(folder)
    DAMAGES[damage](entry)
    with caplog.at_level(logging.WARNING, "optimum_neuron"):
        assert not cache.fetch(KEY, folder, "graph", ".so")
    assert folder_bytes(folder) == {} and not entry.exists()
    assert [message for message in caplog.messages if "is compiled again" in message]
    assert not cache.fetch(KEY, folder, "graph", ".so")
    store(cache, folder, code=b"anew")
    empty(folder)
    assert cache.fetch(KEY, folder, "graph", ".so")
    assert (folder / "graph.so").read_bytes() == b"anew" * 1000


def test_what_turned_out_to_be_of_no_use_is_forgotten(cache: CompileCache, folder: Path) -> None:
    entry = store(cache, folder)
    store(cache, folder, OTHER, b"good")
    (cache.folder / ("2" * 64)).mkdir(mode=0o700)  # broken, and no reason to fail
    cache.forget(json.loads((entry / "entry.json").read_text(encoding="utf-8"))[".so"])
    assert not cache.fetch(KEY, folder, "graph", ".so") and cache.fetch(OTHER, folder, "graph", ".so")


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_no_other_user_may_write_whatever_the_umask(root: Path, folder: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        store(CompileCache("neuron"), folder)
    finally:
        os.umask(before)
    assert CompileCache("neuron").fetch(KEY, folder, "graph", ".so")
    paths = [root, *root.rglob("*")]
    assert len(paths) == 7 and not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in paths)


def test_a_cache_that_others_may_write_to_is_refused(root: Path) -> None:
    CompileCache("neuron")
    words = r"cache\S* can be changed by other users, and this process would run what it holds; set OPTIMUM_NEURON"
    for level, mode in product(("", "neuron"), (0o770, 0o775, 0o1777)):
        (root / level).chmod(mode)
        with pytest.raises(PermissionError, match=words):
            CompileCache("neuron")
        (root / level).chmod(0o755)
        CompileCache("neuron")
    assert cache_folder("vllm") == root / "vllm"  # what vLLM exports into the cache is under the same rule
    (root / "vllm").chmod(0o777)
    with pytest.raises(PermissionError, match=r"can be changed by other users"):
        cache_folder("vllm")


def test_a_cache_of_somebody_else_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CompileCache("neuron")
    owner = root.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        CompileCache("neuron")  # what an administrator made is trusted
        os.chown(root, 12345, 12345)
    with pytest.raises(PermissionError, match=r"the compile cache \S+ belongs to user \d+, and this process would"):
        CompileCache("neuron")


def test_a_cache_that_cannot_be_made_or_is_full_is_told_by_its_folder(root: Path) -> None:
    root.write_text("a file")
    with pytest.raises(OSError, match=r"the compile cache \S+ cannot be made \(.*\); set OPTIMUM_NEURON_CACHE to a"):
        CompileCache("neuron")
    root.unlink()
    cache = CompileCache("neuron")
    full = rf"no space is left on the disk of {cache.folder}; free some, or set OPTIMUM_NEURON"
    with pytest.raises(OSError, match=full), cache.scratch():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(cache.folder.iterdir()) == []


def test_a_cache_that_may_only_be_read_gives_what_it_has(
    cache: CompileCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(cache, folder)
    monkeypatch.setattr(entries_module.os, "access", lambda path, mode: False)
    assert cache.fetch(KEY, folder, "graph", ".so")
    with pytest.raises(PermissionError, match=r"may not be written to; set OPTIMUM_NEURON_CACHE"), cache.scratch():
        pass


def test_writers_readers_damage_and_who_makes_room_at_once_give_whole_code_or_none(
    cache: CompileCache, tmp_path: Path
) -> None:
    def work(number: int) -> list[bytes]:
        folder = tmp_path / str(number)
        folder.mkdir()
        found = []
        for turn in range(15):
            if cache.fetch(KEY, folder, "graph", ".so"):
                found.append((folder / "graph.so").read_bytes())
            else:
                store(cache, folder, code=b"%d" % number)
            if turn % 3 == number % 3:
                try:
                    flip(cache.folder / KEY / "code.so")
                except OSError:
                    continue  # it is gone just now
            if turn % 4 == number % 4:
                prune(max_size=0, older_than=None, dry_run=False)
        return found

    with ThreadPoolExecutor(4) as threads:
        found = [code for codes in threads.map(work, range(4)) for code in codes]
    assert found and set(found) <= {b"%d" % number * 1000 for number in range(4)}
    assert not [path for path in cache.folder.iterdir() if path.name != KEY]


@pytest.mark.parametrize("read", [0, 1])
def test_an_entry_that_goes_while_it_is_read_is_compiled_again_without_a_warning(
    cache: CompileCache, folder: Path, read: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store(cache, folder)
    empty(folder)
    copied: list[str] = []

    def copy(source: Path, path: Path) -> str:
        if len(copied) == read:
            assert prune(max_size=0, older_than=None, dry_run=False)[0]
        copied.append(source.name)
        return copy_file(source, path)

    copy_file = entries_module.copy_file
    monkeypatch.setattr(entries_module, "copy_file", copy)
    assert not cache.fetch(KEY, folder, "graph", ".so")
    assert len(copied) == read + 1 and folder_bytes(folder) == {} and not caplog.messages


KILLS = {"while code is copied": "copy_file", "before it is an entry": "write_documents"}


@pytest.mark.parametrize("step", [*KILLS, "before the rename"])
def test_a_killed_writer_leaves_no_entry_and_the_next_one_cleans_up(
    cache: CompileCache, folder: Path, step: str
) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        if step in KILLS:
            setattr(entries_module, KILLS[step], die)
        else:
            CompileCache.admit = die  # type: ignore[method-assign]
        store(cache, folder)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert not cache.fetch(KEY, folder, "graph", ".so") and len(list(cache.folder.iterdir())) == 1
    store(cache, folder)
    assert [path.name for path in cache.folder.iterdir()] == [KEY]


KEYS = [str(number) * 64 for number in range(4)]


def keys(entries: list[CacheEntry]) -> list[str]:
    return [entry.path.name for entry in entries]


@pytest.fixture
def entries(cache: CompileCache, folder: Path) -> list[Path]:
    """Of two kinds, each used an hour before the next."""
    found = [store(CompileCache("cpu" if number % 2 else "neuron"), folder, key) for number, key in enumerate(KEYS)]
    for number, entry in enumerate(found):
        used(entry, 3600 * (len(found) - number))
    return found


def test_the_last_used_stay_within_a_size_of_all_kinds_together(entries: list[Path]) -> None:
    size = list_entries()[0].size
    for dry_run in (True, False):
        removed, kept = prune(max_size=2 * size + 1, older_than=None, dry_run=dry_run)
        assert keys(removed) == [KEYS[1], KEYS[0]] and keys(kept) == [KEYS[3], KEYS[2]]
        assert sum(entry.exists() for entry in entries) == (4 if dry_run else 2)
    assert keys(list_entries()) == [KEYS[3], KEYS[2]]
    assert prune(max_size=2 * size, older_than=None, dry_run=False)[0] == []


def test_what_was_not_used_for_long_goes(cache: CompileCache, entries: list[Path], folder: Path) -> None:
    assert cache.fetch(KEYS[0], folder, "graph", ".so")  # a use
    removed, kept = prune(max_size=None, older_than=2.5 * 3600, dry_run=False)
    assert keys(removed) == [KEYS[1]] and keys(kept) == [KEYS[0], KEYS[3], KEYS[2]]
    assert prune(max_size=0, older_than=2.5 * 3600, dry_run=False)[1] == []


def test_broken_entries_and_what_killed_processes_left_go_too(cache: CompileCache, folder: Path) -> None:
    store(cache, folder)
    (cache.folder / OTHER).mkdir(mode=0o700)
    (cache.folder / ("2" * 64)).write_bytes(b"a file")
    (cache.folder / ".compile.partial-abandoned").mkdir()
    assert len(list_entries()) == 3
    prune(max_size=0, older_than=None, dry_run=False)
    assert list(cache.folder.iterdir()) == []


def test_exports_keep_a_cache_as_small_as_a_variable_says(
    entries: list[Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = list_entries()[0].size
    monkeypatch.setenv(SIZE_VARIABLE, str(2 * size))
    store(CompileCache("cpu"), folder, "9" * 64)
    assert keys(list_entries()) == ["9" * 64, KEYS[3]]
    # What is made now stays, however large it is; who makes the same at once finds the other's.
    monkeypatch.setenv(SIZE_VARIABLE, "1B")
    for _ in range(2):
        store(CompileCache("cpu"), folder, KEY)
        assert keys(list_entries()) == [KEY]
    assert (folder / "graph.so").read_bytes() == b"code" * 1000


def test_a_variable_that_is_no_size_stops_an_export_before_it_starts(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("much", "-1GB", "10 parsecs", "1e9", "nan", "1" * 19, "1.GB", "٣GB"):
        monkeypatch.setenv(SIZE_VARIABLE, text)
        words = rf"{SIZE_VARIABLE}: '{text}' is no size; give a number and a unit, as in 500"
        with pytest.raises(ValueError, match=words):
            CompileCache("neuron")
    assert not list(root.rglob("*/*"))


def test_sizes_and_ages_are_as_people_write_them() -> None:
    sizes = {"0": 0, "4096": 4096, "10GB": 10**10, "1.5 tb": 15 * 10**11, "512MiB": 2**29, " 3kib ": 3072, "7b": 7}
    assert {text: parse_size(text) for text in sizes} == sizes
    ages = {"12h": 12 * 3600, "30d": 30 * 86400, "0.5w": 302400, "0d": 0}
    assert {text: parse_age(text) for text in ages} == ages
    for text in ("30", "d", "-1d", "1m", "1dd", ""):
        with pytest.raises(ValueError, match=r"is no age; give a number and a unit, as in 12h, 30d or 2w"):
            parse_age(text)
