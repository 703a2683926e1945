# SPDX-License-Identifier: Apache-2.0
"""python -m benchmark.serving.stall from end to end on a tiny checkpoint, and what is read from the times of tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmark.serving import stall
from benchmark.serving.workloads import LONG, Stall, Trace, Users
from benchmark.systems import PromptSource


def test_pauses_are_those_that_overlap_the_time_until_the_first_token_of_the_long_prompt() -> None:
    workload = Stall(1, 4, 8, warm_tokens=2, after_tokens=2, long_new_tokens=1)
    trace = Trace({"decode0": 0.0, LONG: 2.5}, {"decode0": [1.0, 2.0, 6.0, 6.5], LONG: [5.0]})
    found = workload.results(trace)
    assert (found["ttft_ms"], found["decode_itl_ms"], found["itl_max_ms"]) == (2500, 2500, 4000)
    assert found["tok_s"] == pytest.approx(5 / 6.5)


def test_as_many_requests_as_users_are_in_flight() -> None:
    jobs = Users(2, 5, prompt=10, new_tokens=10).jobs(PromptSource(100, 0))
    assert all(8 <= len(job.prompt) <= 12 and 8 <= job.new_tokens <= 12 for job in jobs)
    trace, waiting = Trace(), list(jobs)
    assert [job.name for job in trace.take_due(waiting)] == ["0", "1"] and not trace.take_due(waiting)
    trace.tokens["0"] = list(np.arange(jobs[0].new_tokens))
    assert [job.name for job in trace.take_due(waiting)] == ["2"]


@pytest.mark.slow
def test_it_runs(
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
