# SPDX-License-Identifier: Apache-2.0
"""Prefill by the size of a chunk."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmark.generate import chunks


@pytest.mark.slow
def test_it_runs(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(tiny_checkpoint), "--dtype", "float32", "--prompt-lengths", "24", "9"]
    options += ["--chunk-sizes", "16", "8", "--rounds", "1", "--artifacts", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["chunks", *options])
    assert chunks.main() == 0
    prompts = json.loads(capsys.readouterr().out.splitlines()[-1])["prompts"]
    assert [(each["prompt"], each["chunk"]) for each in prompts] == [(9, 8), (9, 16), (24, 8), (24, 16)]
    assert all(each["tokens_per_s"] > 0 and each["of_largest"] > 0 for each in prompts)
    assert [each["of_largest"] for each in prompts[1::2]] == [1, 1]
