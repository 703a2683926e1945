# SPDX-License-Identifier: Apache-2.0
"""Benchmarks from end to end on tiny models, and how their numbers are made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny import TINY_SIZES
from transformers import NemotronHConfig

from benchmark.generate import formats
from benchmark.recurrent import __main__ as recurrent
from benchmark.recurrent import shapes
from benchmark.recurrent.measure import parts_of, state_share
from benchmark.recurrent.results import SHAPES
from benchmark.serving import stall
from benchmark.serving.workloads import LONG, Stall, Trace, Users
from benchmark.systems import PromptSource
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


def test_each_instruction_set_has_a_process_held_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CPU_VARIABLE, raising=False)
    started: dict[str, list[str]] = {}
    reports: list[dict[str, Any]] = []

    def run(command: list[str], *, env: dict[str, str], **options: object) -> subprocess.CompletedProcess[str]:
        started[env[CPU_VARIABLE]] = command
        results = [{"instruction_set": env[CPU_VARIABLE]}]
        return subprocess.CompletedProcess(command, 0, f"a table\n{json.dumps({'results': results})}\n")

    monkeypatch.setattr(formats, "warn_if_busy", lambda: None)
    monkeypatch.setattr(formats, "describe_machine", dict)
    monkeypatch.setattr(formats, "SECTION", SimpleNamespace(finish=lambda report, file: reports.append(report)))
    monkeypatch.setattr(formats.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["formats", "--rows", "2", "--artifacts", str(tmp_path)])
    assert formats.main() == 0
    names = [each.name for each in list_instruction_sets() if each.needs]
    assert list(started) == names
    for name, command in started.items():
        assert command[:5] == [sys.executable, "-m", "benchmark.generate.formats", "--rows", "2"]
        assert command[-4:] == ["--instruction-sets", name, "--artifacts", str(tmp_path)]
    assert [each["instruction_set"] for each in reports[0]["results"]] == names


@pytest.mark.slow
def test_formats_run(
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


def test_pauses_are_those_that_overlap_the_time_until_the_first_token_of_the_long_prompt() -> None:
    workload = Stall(1, 4, 8, warm_tokens=2, after_tokens=2, long_new_tokens=1)
    trace = Trace({"decode0": 0.0, LONG: 2.5}, {"decode0": [1.0, 2.0, 6.0, 6.5], LONG: [5.0]})
    found = workload.results(trace)
    assert (found["ttft_ms"], found["decode_itl_ms"], found["itl_max_ms"]) == (2500, 2500, 4000)
    assert found["tok_s"] == pytest.approx(5 / 6.5)
    # As many requests as users are in flight.
    jobs = Users(2, 5, prompt=10, new_tokens=10).jobs(PromptSource(100, 0))
    assert all(8 <= len(job.prompt) <= 12 and 8 <= job.new_tokens <= 12 for job in jobs)
    trace, waiting = Trace(), list(jobs)
    assert [job.name for job in trace.take_due(waiting)] == ["0", "1"] and not trace.take_due(waiting)
    trace.tokens["0"] = list(np.arange(jobs[0].new_tokens))
    assert [job.name for job in trace.take_due(waiting)] == ["2"]


@pytest.mark.slow
def test_a_long_prompt_among_decodes_runs(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stall, "CHUNK_SIZE", 8)
    monkeypatch.setattr(stall, "SHORT_PROMPT", 8)
    options = ["--model", str(tiny_checkpoint), "--dtype", "float32", "--long-prompt", "64", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["stall", *options, "--artifacts", str(tmp_path), "--scenarios", "stall"])
    assert stall.main() == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(report["numbers"]["stall"]) == [*stall.POLICIES, "transformers"]
    assert {step["kind"] for step in report["steps"]} == {"chunked_prefill", "mixed", "token_generation"}
    assert report["padding"]["stall"]["mixed"]["padded_share"] == 0


def test_parts_are_medians_of_all_runs_but_the_first() -> None:
    def _span(track: str, name: str, begin: float, end: float, **facts: int) -> dict[str, Any]:
        return {"cat": track, "name": name, "ts": begin, "dur": end - begin, "args": facts}

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
    events.append(_span("graphs", "token_generation_context8", 9e4, 9.5e4, run=5))  # without operators
    parts = parts_of(events)
    assert parts.keys() == {"decode"}
    ms = {name: value for name, value in parts["decode"].items() if value}
    expected = {"recurrence": 3e-3, "convolution": 1e-3, "elementwise": 5e-3, "other": 2e-3}
    assert ms == pytest.approx(expected)
    assert state_share(parts["decode"]) == pytest.approx(4 / 11)


@pytest.mark.slow
def test_recurrence_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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
