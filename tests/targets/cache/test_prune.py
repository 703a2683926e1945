# SPDX-License-Identifier: Apache-2.0
"""Room in the compile cache: who was used last stays, what an export needs is there, and sizes are as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from cached import KEY, OTHER, store, used

from optimum_neuron.targets.cache.entries import SIZE_VARIABLE, CacheEntry, list_entries, prune
from optimum_neuron.targets.cache.store import CompileCache
from optimum_neuron.targets.cache.units import parse_age, parse_size


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
