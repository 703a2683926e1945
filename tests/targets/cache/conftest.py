# SPDX-License-Identifier: Apache-2.0
"""A compile cache of the test's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from cached import Command, call
from hub_server import LoopbackHub, connected_hub

from optimum_neuron.artifact.user_cache import CACHE_VARIABLE
from optimum_neuron.targets.cache.entries import SIZE_VARIABLE
from optimum_neuron.targets.cache.store import CompileCache


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(SIZE_VARIABLE, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def cache(root: Path) -> CompileCache:
    return CompileCache("neuron")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody waits; holds for how long."""
    asked: list[float] = []
    monkeypatch.setattr(time, "sleep", asked.append)
    return asked


@pytest.fixture
def hub(root: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with connected_hub(monkeypatch) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where an export wants its code."""
    (tmp_path / "graphs").mkdir()
    return tmp_path / "graphs"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `optimum-cli neuron cache` with words, and returns its exit code, stdout and stderr."""
    return partial(call, monkeypatch, capsys)
