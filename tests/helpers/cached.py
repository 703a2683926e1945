# SPDX-License-Identifier: Apache-2.0
"""Entries of the compile cache for tests, without a compiler."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from optimum.commands import optimum_cli

from optimum_neuron.artifact.user_cache import CACHE_VARIABLE
from optimum_neuron.targets.cache.entries import About
from optimum_neuron.targets.cache.store import CompileCache


Command = Callable[..., tuple[int, str, str]]
KEY, OTHER = "0" * 64, "1" * 64
ABOUT = About("token_generation", "trn2", "neuronx-cc 2.27")


def store(cache: CompileCache, folder: Path, key: str = KEY, code: bytes = b"code", about: About = ABOUT) -> Path:
    """Puts an entry of two files there; returns it."""
    with cache.scratch() as scratch:
        (scratch / "graph.so").write_bytes(code * 1000)
        (scratch / "graph.constants").write_bytes(b"constants")
        cache.store(key, scratch, "graph", folder, about)
    return cache.folder / key


def move_away(monkeypatch: pytest.MonkeyPatch) -> Path:
    """As another machine, which has no cache yet; returns the folder of that."""
    root = Path(os.environ[CACHE_VARIABLE])
    monkeypatch.setenv(CACHE_VARIABLE, str(root.with_name("another")))
    return root.with_name("another")


def used(entry: Path, seconds_ago: float) -> None:
    """Makes an entry one that was used some time ago."""
    record = entry / "entry.json"
    time = record.stat().st_mtime - seconds_ago
    os.utime(record, (time, time))


def flip(path: Path) -> None:
    """Changes a bit of a file, in place: nobody sees an emptied file."""
    with path.open("r+b") as file:
        data = bytearray(file.read())
        data[len(data) // 2] ^= 1
        file.seek(0)
        file.write(data)


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of `optimum-cli neuron cache`."""
    monkeypatch.setattr(sys, "argv", ["optimum-cli", "neuron", "cache", *words])
    monkeypatch.setenv("COLUMNS", "120")
    code = 0
    try:
        optimum_cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    done = capsys.readouterr()
    return code, done.out, done.err
