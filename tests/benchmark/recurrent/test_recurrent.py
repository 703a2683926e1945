# SPDX-License-Identifier: Apache-2.0
"""python -m benchmark.recurrent from end to end, on a tiny model; and what of a step is for what."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import TINY_SIZES
from transformers import NemotronHConfig

from benchmark.recurrent import __main__ as recurrent
from benchmark.recurrent import shapes
from benchmark.recurrent.measure import parts_of, state_share
from benchmark.recurrent.results import SHAPES


def _span(track: str, name: str, begin: float, end: float, **facts: int) -> dict[str, Any]:
    return {"cat": track, "name": name, "ts": begin, "dur": end - begin, "args": facts}


def test_parts_are_medians_of_all_runs_but_the_first() -> None:
    events = [_span("steps", "decode", 0, 9e6)]
    for number, (walk, map_) in enumerate([(900, 900), (1, 7), (5, 3), (3, 5)], 1):
        begin = number * 1e4
        events += [
            _span("graphs", "token_generation_context8", begin, begin + 5000, run=number),
            _span("operators", "Walk kv_cache.state_0_0", begin, begin + walk),
            _span("operators", "Convolve kv_cache.conv_0_0", begin + 1000, begin + 1001),
            _span("operators", "Map", begin + 2000, begin + 2000 + map_),
            _span("operators", "aten.topk.default", begin + 3000, begin + 3002),
        ]
    events.append(_span("graphs", "token_generation_context8", 9e4, 9.5e4, run=5))  # not told by operator
    parts = parts_of(events)
    assert parts.keys() == {"decode"}
    ms = {name: value for name, value in parts["decode"].items() if value}
    expected = {"recurrence": 3e-3, "convolution": 1e-3, "elementwise": 5e-3, "other": 2e-3}
    assert ms == pytest.approx(expected)
    assert state_share(parts["decode"]) == pytest.approx(4 / 11)


@pytest.mark.slow
def test_it_runs_and_float32_tokens_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = {"layers_block_type": ["linear_attention", "full_attention"], "ssm_state_size": 8, "n_groups": 2}
    tiny = NemotronHConfig(**TINY_SIZES | layers, mamba_num_heads=4, mamba_head_dim=32)
    assert shapes.CONFIGS.keys() == SHAPES.keys()
    monkeypatch.setitem(shapes.CONFIGS, "nemotron-h", lambda quick: tiny)
    monkeypatch.setattr(recurrent, "NEW_TOKENS", 4)
    options = ["--shapes", "nemotron-h", "--dtypes", "float32", "--rows", "2", "1", "--prompt-lengths", "8"]
    options += ["--rounds", "1", "--artifacts", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["recurrent", *options])
    assert recurrent.main() == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["case"]["batch_size"] for each in report["cases"]] == [1, 2]
    for each in report["cases"]:
        assert each["case"]["agreement"]["eager"]["equal_tokens"] == 4 * each["case"]["batch_size"]
        assert each["state_bytes"] == 4 * (4 * 8 * 32 + 3 * (128 + 2 * 2 * 8))
        for run in ("prefill", "decode"):
            assert each["parts"][run]["ms"]["recurrence"] > 0 and each["parts"][run]["ms"]["convolution"] > 0
            assert 0 < each["state_shares"][run] < 1
        mamba, attention = 64 * (128 + 160 + 4) + 128 * 64, 2 * 64 * 64 + 2 * 64 * 32
        assert each["operations"] == 2 * each["case"]["batch_size"] * (8 * (mamba + attention) + 300 * 64)
        eager = each["case"]["speeds"]["eager"]["prefill_tok_s"]["median"]
        shortest = each["operations"] / report["limits"]["products"]["float32"]
        assert each["at_most"]["eager"] == pytest.approx(8 * each["case"]["batch_size"] / eager / shortest)
