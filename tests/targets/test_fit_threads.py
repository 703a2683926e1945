# SPDX-License-Identifier: Apache-2.0
"""torch's own number of threads is lowered to the cores that a process may use; a number that somebody chose stays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers import artifact_runner, export_tiny

from optimum_neuron.targets import threads
from optimum_neuron.targets.threads import count_fitted, fit_threads


Machine = Callable[[int, int], list[int]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Plays one of 16 CPUs in 8 cores, of which a process may run on 12 in 6; returns what torch is told."""
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    told: list[int] = []

    def play(found: int, usable: int) -> list[int]:
        fit_threads.cache_clear()
        monkeypatch.setattr(torch, "get_num_threads", lambda: found)
        monkeypatch.setattr(torch, "set_num_threads", told.append)
        monkeypatch.setattr(threads, "usable_cores", lambda: usable)
        monkeypatch.setattr(threads, "allowed_cpus", lambda: frozenset(range(12)))
        monkeypatch.setattr(threads, "physical_cores", lambda cpus: len(cpus) // 2)
        monkeypatch.setattr(threads.os, "cpu_count", lambda: 16)
        return told

    yield play
    fit_threads.cache_clear()


@pytest.mark.parametrize("found", [16, 12, 8, 6])
def test_torchs_own_number_is_lowered_once_with_a_line(
    found: int, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    told = machine(found, 3)
    with caplog.at_level(logging.INFO, "optimum_neuron"):
        fit_threads()
        fit_threads()
    assert told == [3]
    assert [each.getMessage() for each in caplog.records] == [
        f"computing with 3 threads, not {found}: this process may use no more cores; OMP_NUM_THREADS sets another number"
    ]


def test_a_number_that_fits_or_was_chosen_stays(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for found, usable in ((2, 3), (6, 7), (5, 3), (20, 3), (1, 1)):  # fewer, fitting, chosen, more than there are, one
        given = machine(found, usable)
        fit_threads()
        assert given == []
    for name in threads.VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "16")
            given = machine(16, 3)
            fit_threads()
            assert given == []
        monkeypatch.setenv(name, "")  # is no choice
    machine(16, 3)
    assert count_fitted() == 16 and given == [3]  # the played torch answers as before


def test_loading_lowers_it_once_so_that_what_a_user_chooses_later_stays(
    machine: Machine, cpu_artifact: Callable[[str], Path], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    for path in (export_tiny(tiny_checkpoint, tmp_path / "artifact"), cpu_artifact("llama")):
        told = machine(16, 3)
        told.clear()
        for _ in range(2):
            artifact_runner(path)
        assert told == [3]


def test_an_export_computes_with_threads_that_fit(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[bool] = []
    monkeypatch.setattr(
        "optimum_neuron.export.recipe.fit_threads", lambda: fitted.append((tmp_path / "artifact").exists())
    )
    export_tiny(tiny_checkpoint, tmp_path / "artifact")
    assert fitted == [False]
