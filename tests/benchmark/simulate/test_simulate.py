# SPDX-License-Identifier: Apache-2.0
"""The simulator of benchmark/: its costs against the published figures, and nothing lost on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.simulate.__main__ import main
from benchmark.simulate.options import POLICIES
from benchmark.simulate.simulation import Workload, simulate
from benchmark.simulate.step_costs import Calibration
from benchmark.simulate.sweep import check_calibration
from optimum_neuron.config import NeuronConfig
from optimum_neuron.engine.policy import Policy, SchedulerOptions
from optimum_neuron.engine.scheduler import Scheduler
from optimum_neuron.graphs.family import GraphFamily
from optimum_neuron.graphs.spec import GraphKind, graph_specs
from optimum_neuron.tune.simulate import Outcome


SMALL = ("--requests", "12", "--users", "4", "--batch-sizes", "4", "--chunk-sizes", "256", "--new-tokens", "20")
LINE = [
    {"kind": "token_generation", "batch_size": 32, "ms": 24.6},
    {"kind": "chunked_prefill", "ctx_batch_size": 4, "chunk_size": 256, "ms": 148.0},
    {"kind": "chunked_prefill", "chunk_size": 256, "ms": 52.0},
    {"kind": "mixed", "batch_size": 32, "chunk_size": 512, "ms": 91.6},
]


def config(policy: Policy = "mixed", **sizes: Any) -> NeuronConfig:
    default = {"batch_size": 8, "sequence_length": 4096, "prefill_chunk_size": 256, "mixed_step": policy == "mixed"}
    return NeuronConfig(target="inf2", **{**default, **sizes})


def seconds(kind: GraphKind, context: int = 4096, cost: Calibration | None = None, **sizes: Any) -> float:
    """Of a step of the graph with the largest chunk at a context."""
    graphs = GraphFamily(graph_specs(config(**sizes))).kind(kind)
    return (cost or Calibration()).seconds([graph for graph in graphs if graph.context_length == context][-1])


def outcome(policy: Policy = "mixed", calibration: Calibration | None = None, **load: Any) -> Outcome:
    workload = Workload(**{"requests": 30, "users": 12, "new_tokens": 40, **load})
    options = SchedulerOptions(policy=policy, prefix_reuse=workload.shared_prefix > 0)
    return simulate(config(policy), options, (calibration or Calibration()).seconds, workload)


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, Any], str]:
    assert main([*SMALL, *options]) == 0
    shown = capsys.readouterr().out
    return json.loads(shown.splitlines()[-1]), shown


def test_calibration_gives_the_published_times() -> None:
    assert seconds("token_generation", batch_size=32) == pytest.approx(24.6e-3)
    assert 2 * seconds("chunked_prefill", batch_size=32, prefill_chunk_size=1024) == pytest.approx(296e-3)
    assert seconds("chunked_prefill", ctx_batch_size=4) == pytest.approx(148e-3)


def test_published_run_is_met_within_ten_percent_throughput_and_fifteen_percent_itl() -> None:
    for check in check_calibration():
        ratios = {name: check.simulated[name] / check.published[name] for name in check.published}
        assert ratios["tok/s"] == pytest.approx(1, abs=0.10), check
        assert ratios["ITL mean ms"] == pytest.approx(1, abs=0.15), check


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("load", [{"ramp_s": 3.0}, {"users": 0, "rate": 2.0}, {"shared_prefix": 500}])
def test_no_token_is_lost(policy: Policy, load: dict[str, Any]) -> None:
    result = outcome(policy, **load)
    assert result.finished >= 30
    assert len(result.ttft) + len(result.itl) == result.finished_tokens + result.unfinished_tokens
    assert result.busy <= result.seconds + 1e-6
    assert min(result.ttft) > 0 and min(result.itl) > 0 and min(result.queue) >= 0
    if load.get("rate"):
        assert result.unfinished_tokens == 0 and len(result.ttft) == 30
    shared = load.get("shared_prefix", 0)
    assert min(shared, 1) <= result.statistics.prefix_hit_tokens <= shared * len(result.queue)


def test_time_only_goes_forward() -> None:
    timeline = outcome("alternate").timeline
    ends = [start + seconds for start, seconds, _ in timeline]
    assert len(timeline) > 20
    assert [start for start, _, _ in timeline[1:]] == pytest.approx(ends[:-1])
    assert outcome("alternate").timeline == timeline


def test_steps_cost_what_their_graphs_hold_and_not_what_is_in_them() -> None:
    lonely = outcome(users=1, requests=1, prompt_tokens=10, new_tokens=2, spread=0.0)
    chunk, decode = seconds("chunked_prefill"), seconds("token_generation")
    assert lonely.ttft[0] == pytest.approx(chunk) == pytest.approx((20 + 256 * 0.125) / 1000)
    assert lonely.itl[0] == pytest.approx(decode) == pytest.approx((20 + 8 * 4.6 / 32) / 1000)


def test_mixed_steps_stall_decoding_less_than_whole_prompts() -> None:
    mixed, whole = outcome("mixed", ramp_s=2.0), outcome("all_chunks", ramp_s=2.0)
    assert max(mixed.itl) == pytest.approx(seconds("mixed"))
    assert max(whole.itl) > 3 * max(mixed.itl)


def test_attention_follows_the_context_where_it_is_given() -> None:
    cost = Calibration(attention_ms=8.0)
    short, long = (seconds("mixed", context, cost) for context in (1024, 4096))
    assert long - short == pytest.approx(8.0 * 256 / 1024 * 3 / 1000)
    assert outcome(calibration=cost).seconds < outcome().seconds


def test_the_scheduler_is_the_projects_own(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(Scheduler, "schedule", lambda self, real=Scheduler.schedule: steps.append("") or real(self))
    assert sum(outcome().kinds.values()) == len(steps)


def test_sweep_prints_tables_a_sentence_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    found, shown = run(capsys, "--ctx-batch-sizes", "1", "2", "--itl-p99-ms", "60", "--host-ms", "1")
    assert len(found["rows"]) == 8 and found["check"] == []
    assert found["calibration"]["launch_ms"] == 1
    assert all(row["meets_objective"] == (row["itl_p99_ms"] <= 60) for row in found["rows"])
    assert "meets the objective" in found["recommendation"][0]
    assert " ".join(found["recommendation"]) in " ".join(shown.split())


def test_replicas_share_users_and_the_fewest_are_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--users",
        "40",
        "--replicas",
        "1",
        "5",
        "10",
        "--policies",
        "mixed",
        "--ramp",
        "0",
        "--requests",
        "40",
        "--ttft-p99-ms",
    )
    found, _ = run(capsys, *options, "4000")
    one, five, ten = found["rows"]
    assert one["ttft_p99_ms"] > 4000 > five["ttft_p99_ms"] > ten["ttft_p99_ms"]
    assert ten["tok_s"] > five["tok_s"] > 3 * one["tok_s"]
    assert "5 replicas" in found["recommendation"][0]
    found, _ = run(capsys, *options, "1")
    assert "nothing meets the TTFT p99 of 1 ms" in found["recommendation"][0]


def test_calibration_from_measured_steps_and_from_two_times(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_text(json.dumps({"steps": LINE}))
    two = Calibration.from_times(24.6, 32, 148.0, 1024, "two")
    for found in (Calibration.from_file(file), two):
        for name in ("weights_ms", "row_ms", "token_ms", "mixed_ms"):
            assert getattr(found, name) == pytest.approx(getattr(Calibration(), name)), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--chunk-sizes", "0"), "'0' is not a whole number of at least 1"),
        (("--decode-ms", "10"), "need each other"),
        (("--rate", "2", "--ramp", "0"), "give one of them"),
        (("--prompt-tokens", "5000"), "exceed --sequence-length 4096"),
        (("--replicas", "5"), "5 replicas cannot share 4 users"),
        (("--chunk-sizes", "8192"), "prefill_chunk_size=8192 is larger than sequence_length=4096"),
        (("--itl-target-ms", "50"), "cannot be kept with policy='prefill_first'"),
        (("--decode-ms", "30", "--chunk-ms", "20"), "is no longer than the 24.4 ms"),
        (("--calibration", "missing.json"), "missing.json"),
    ],
)
def test_bad_options_get_one_sentence(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*SMALL, *options])
    captured = capsys.readouterr()
    assert stopped.value.code in (1, 2) and not captured.out
    assert message in captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must hold an object"),
        ('{"weights_ms": 1, "row_ms": 1, "token_ms": 1, "speed": 3}', "must hold an object"),
        ('{"weights_ms": "1", "row_ms": 1, "token_ms": 1}', "weights_ms='1'"),
        (json.dumps({"steps": LINE[:2]}), "do not tell weights"),
        ('{"steps": [1]}', "needs kind"),
    ],
)
def test_bad_calibrations_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        Calibration.from_file(file)
