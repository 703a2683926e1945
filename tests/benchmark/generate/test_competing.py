# SPDX-License-Identifier: Apache-2.0
"""What a process on one core costs: the loop is where it should be and goes, and times are compared round by round."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmark.generate import competing


def test_the_loop_keeps_its_core_and_ends_with_the_block() -> None:
    core = max(os.sched_getaffinity(0))
    children = Path("/proc/self/task") / str(os.getpid()) / "children"
    before = set(children.read_text().split())
    with competing.busy_core(core):
        (loop,) = set(children.read_text().split()) - before
        assert os.sched_getaffinity(int(loop)) == {core}
    assert set(children.read_text().split()) == before


def test_slowdowns_are_of_the_same_round() -> None:
    (result,) = competing.summarize({"a": {"prefill": {False: [1.0, 4.0, 2.0], True: [2.0, 12.0, 8.0]}}})
    assert result == {"system": "a", "what": "prefill", "alone_ms": 2.0, "beside_ms": 8.0, "times_slower": 3.0}


@pytest.mark.slow
def test_it_runs(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(tiny_checkpoint), "--dtype", "float32", "--prompt-length", "8", "--new-tokens", "3"]
    monkeypatch.setattr(sys, "argv", ["competing", *options, "--rounds", "1", "--artifacts", str(tmp_path)])
    assert competing.main() == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = [(each["system"], each["what"]) for each in report["results"]]
    assert found == [(name, what) for name in ("optimum_neuron", "eager") for what in ("prefill", "decode step")]
