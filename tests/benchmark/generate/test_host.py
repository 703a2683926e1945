# SPDX-License-Identifier: Apache-2.0
"""What generate() and the engine take beside the runs of graphs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmark.generate import host


class _Executable:
    runs_ahead = False

    def run(self, graph: str, inputs: list[int]) -> list[int]:
        return [*inputs, len(graph)]


def test_runs_are_timed_and_all_else_is_the_executable_s() -> None:
    timed = host.TimedRuns(_Executable())
    assert timed.run("one", [1]) == [1, 3] and timed.runs_ahead is False
    assert len(timed.seconds) == 1 and timed.seconds[0] > 0


@pytest.mark.slow
def test_it_runs(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(tiny_checkpoint), "--dtype", "float32", "--new-tokens", "4", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["host", *options, "--artifacts", str(tmp_path)])
    assert host.main() == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["path"] for each in report["paths"]] == ["generate", "engine"]
    assert all(0 < each["beside_ms"] < each["ms"] and 0 < each["share"] < 1 for each in report["paths"])
