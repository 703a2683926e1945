# SPDX-License-Identifier: Apache-2.0
"""Entries of the compile cache for tests, without a compiler."""

from __future__ import annotations

import os
from pathlib import Path

from optimum_neuron.targets.cache.entries import About
from optimum_neuron.targets.cache.store import CompileCache


KEY, OTHER = "0" * 64, "1" * 64
ABOUT = About("token_generation", "trn2", "neuronx-cc 2.27")


def store(cache: CompileCache, folder: Path, key: str = KEY, code: bytes = b"code", about: About = ABOUT) -> Path:
    """Puts an entry of two files there; returns it."""
    with cache.scratch() as scratch:
        (scratch / "graph.so").write_bytes(code * 1000)
        (scratch / "graph.constants").write_bytes(b"constants")
        cache.store(key, scratch, "graph", folder, about)
    return cache.folder / key


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
