# SPDX-License-Identifier: Apache-2.0
"""python -m benchmark.generate from end to end, on a tiny checkpoint: its own processes, equal tokens, JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmark.generate import __main__ as generate


def test_it_runs_from_any_folder_and_float32_tokens_are_equal(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--model", str(tiny_checkpoint), "--dtype", "float32", "--target", "eager", "--peers", "eager"]
    options += ["--batch-sizes", "1", "--prompt-lengths", "8", "--new-tokens", "3", "--repeats", "1"]
    options += ["--artifacts", "artifacts", "--json", "out/generate.json"]
    monkeypatch.setattr(sys, "argv", ["generate", *options])
    assert generate.main() == 0
    shown = capsys.readouterr().out
    report = json.loads(shown.splitlines()[-1])
    assert report == json.loads(Path("out/generate.json").read_text(encoding="utf-8"))
    (case,), (artifact,) = report["cases"], report["artifacts"]
    assert case["agreement"]["eager"] == {"tokens": 3, "equal_tokens": 3, "rows": 1, "equal_rows": 1}
    # Told by a process of its own.
    assert artifact["probe"]["weights_bytes"] > 0 and artifact["probe"]["peak_bytes"] > 0
