# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron cache: what it tells of the entries, what it removes, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from cached import KEY, OTHER, Command, flip, store, used

from optimum_neuron import targets
from optimum_neuron.targets.cache.entries import KINDS, SIZE_VARIABLE, About, list_entries, verify
from optimum_neuron.targets.cache.store import CompileCache


def test_entries_are_listed_by_what_they_are_of(cache: CompileCache, folder: Path, command: Command) -> None:
    used(store(cache, folder), 1e6)
    store(CompileCache("cpu"), folder, OTHER, about=About("mixed", "cpu", "torch 2.13.0"))
    code, out, _ = command("ls")
    lines = [line for line in out.splitlines() if KEY[:8] in line or OTHER[:8] in line]
    assert code == 0 and len(lines) == 2
    assert all(word in lines[0] for word in ("mixed", "cpu", "torch 2.13.0", "4.2 kB"))
    assert all(word in lines[1] for word in ("token_generation", "trn2", "neuronx-cc 2.27"))
    assert out.splitlines()[-1] == f"2 entries of 8.5 kB in {cache.folder.parent}"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"graph": 3}', json.dumps({"graph": "\x1b[2J", "target": "x" * 201}), "[" * 10000]
)
def test_what_an_entry_says_of_itself_is_never_believed(
    cache: CompileCache, folder: Path, text: str, command: Command
) -> None:
    (store(cache, folder) / "about.json").write_text(text, encoding="utf-8")
    code, out, _ = command("ls")
    assert code == 0 and "\x1b" not in out and list_entries()[0].about == About("-", "-", "-")
    assert cache.fetch(KEY, folder, "graph", ".so")


def test_a_cache_that_is_not_there_has_no_entries_and_is_not_made(root: Path, command: Command) -> None:
    for words in (("ls",), ("verify",), ("prune", "--older-than", "1d")):
        code, out, _ = command(*words)
        assert code == 0 and "0 entries" in out
    assert not root.exists()


def test_entries_are_removed_or_only_named(
    cache: CompileCache, folder: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    old, new = store(cache, folder), store(cache, folder, OTHER)
    used(old, 3 * 86400)
    _, out, _ = command("prune", "--older-than", "2d", "--dry-run")
    assert KEY[:8] in out and "1 entry of 4.2 kB would be removed; 1 entry of 4.2 kB would be left" in out
    assert old.exists()
    _, out, _ = command("prune", "--older-than", "2d")
    assert "1 entry of 4.2 kB removed; 1 entry of 4.2 kB left" in out and not old.exists()
    code, out, err = command("prune")
    assert (code, out) == (1, "") and err == (
        f"error: nothing says what to remove; give --max-size or --older-than, or set {SIZE_VARIABLE}\n"
    )
    monkeypatch.setenv(SIZE_VARIABLE, "1kB")
    command("prune")
    assert not new.exists()


def test_broken_entries_are_named_and_removed(cache: CompileCache, folder: Path, command: Command) -> None:
    entry, whole = store(cache, folder), store(cache, folder, OTHER)
    nothing = cache.folder / ("2" * 64)
    nothing.mkdir(mode=0o700)
    (nothing / "entry.json").write_text("{}", encoding="utf-8")
    flip(entry / "code.constants")
    code, out, _ = command("verify")
    assert code == 1 and entry.exists() and "3 entries of 8.5 kB checked, 2 broken" in out
    assert f"{entry} is broken: code.constants is not what was stored; run again with --remove\n" in out
    assert f"{nothing} is broken: entry.json names no files and digests" in out
    code, out, _ = command("verify", "--remove")
    assert code == 0 and f"{entry} is broken: code.constants is not what was stored; removed\n" in out
    assert list(cache.folder.iterdir()) == [whole]
    assert command("verify")[0] == 0


@pytest.mark.parametrize(("name", "found"), [("entry.json", 1), ("about.json", 0), ("code.constants", 1)])
def test_a_pipe_in_an_entry_is_not_waited_for(
    name: str, found: int, cache: CompileCache, folder: Path, command: Command
) -> None:
    entry = store(cache, folder)
    (entry / name).unlink()
    os.mkfifo(entry / name, mode=0o600)
    code, out, _ = command("verify")
    assert (code, "is no regular file" in out) == (found, bool(found))
    command("prune", "--max-size", "1")
    assert not entry.exists()


def test_an_entry_that_another_process_takes_away_is_no_broken_one(cache: CompileCache, folder: Path) -> None:
    both = {store(cache, folder), store(cache, folder, OTHER)}
    checked = verify(remove=True)
    (entry, problem) = next(checked)
    shutil.rmtree(*both - {entry.path})
    assert problem is None and list(checked) == []


def test_every_kind_of_code_is_known() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in Path(targets.__file__).parent.rglob("*.py"))
    assert sorted(re.findall(r'^CACHE_KIND = "(\w+)"', sources, re.MULTILINE)) == sorted(KINDS)


def test_a_cache_that_others_may_write_to_is_not_looked_at_and_a_link_is_called_one(
    cache: CompileCache, folder: Path, tmp_path: Path, command: Command
) -> None:
    store(cache, folder)
    cache.folder.chmod(0o777)
    for words in (("ls",), ("verify", "--remove"), ("prune", "--max-size", "0")):
        code, _, err = command(*words)
        assert code == 1 and "can be changed by other users" in err
    assert (cache.folder / KEY).exists()
    cache.folder.chmod(0o700)
    (cache.folder / KEY).rename(tmp_path / "elsewhere")
    (cache.folder / KEY).symlink_to(tmp_path / "elsewhere")
    code, out, _ = command("verify")
    assert code == 1 and f"{KEY} is a link, which may lead out of the cache; run again with --remove" in out
