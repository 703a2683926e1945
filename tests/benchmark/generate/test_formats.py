# SPDX-License-Identifier: Apache-2.0
"""Formats of weights against plain ones: ratios are of one round, and every instruction set is measured in a process that is held to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark.generate import formats
from optimum_neuron.kernels.host.instruction_sets import CPU_VARIABLE, choose_instruction_set, list_instruction_sets


def test_a_ratio_is_of_one_round_a_slower_format_is_marked_and_an_unknown_set_is_refused() -> None:
    times: formats.Times = {
        ("plain", None): {"1": [2.0, 8.0, 4.0]},
        ("int8", "int8"): {"1": [1.0, 2.0, 4.0]},
        ("int4", None): {"1": [4.0, 8.0, 16.0]},
    }
    found = [(each["ms"], each["times_plain"], each["lost"]) for each in formats.summarize("avx2", times)]
    assert found == [(4.0, 1.0, False), (2.0, 2.0, False), (8.0, 0.5, True)]
    with pytest.raises(ValueError, match=r"--instruction-sets mmx is none of this machine's; choose of .*baseline"):
        formats.chosen_sets(["mmx"])


def test_each_instruction_set_has_a_process_that_is_held_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CPU_VARIABLE, raising=False)
    started: list[tuple[str, list[str]]] = []
    reports: list[dict[str, Any]] = []

    def run(command: list[str], *, env: dict[str, str], **options: object) -> subprocess.CompletedProcess[str]:
        started.append((env[CPU_VARIABLE], command))
        results = [{"instruction_set": env[CPU_VARIABLE]}]
        return subprocess.CompletedProcess(command, 0, f"a table\n{json.dumps({'results': results})}\n")

    monkeypatch.setattr(formats, "warn_if_busy", lambda: None)
    monkeypatch.setattr(formats, "describe_machine", dict)
    monkeypatch.setattr(formats, "SECTION", SimpleNamespace(finish=lambda report, file: reports.append(report)))
    monkeypatch.setattr(formats.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["formats", "--rows", "2", "--artifacts", str(tmp_path)])
    assert formats.main() == 0
    names = [each.name for each in list_instruction_sets() if each.needs]
    assert [name for name, _ in started] == names
    for name, command in started:
        assert command[:5] == [sys.executable, "-m", "benchmark.generate.formats", "--rows", "2"]
        assert command[-4:] == ["--instruction-sets", name, "--artifacts", str(tmp_path)]
    assert [each["instruction_set"] for each in reports[0]["results"]] == names


@pytest.mark.slow
def test_it_runs(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = choose_instruction_set()
    monkeypatch.setenv(CPU_VARIABLE, own.name)
    options = ["--model", str(tiny_checkpoint), "--dtype", "float32", "--formats", "int8", "--rows", "2", "1"]
    options += ["--rounds", "1", "--artifacts", str(tmp_path)]
    for name, value in {"CONTEXT": 8, "PROMPT": 9, "STEPS": 1}.items():
        monkeypatch.setattr(formats, name, value)
    monkeypatch.setattr(sys, "argv", ["formats", *options])
    assert formats.main() == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    found = [(each["format"], each["activations"], each["case"]) for each in results]
    rounded = "int8" if own.rounded_is_faster else None
    wanted = [("plain", None), ("int8", rounded)]
    assert found == [(*each, case) for each in wanted for case in ("1", "2", "prefill")]
    assert all(each["ms"] > 0 and each["instruction_set"] == own.name for each in results)
