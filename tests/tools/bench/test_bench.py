# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron bench: what it runs, counts and writes. No time is asserted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import Artifacts, Cli, tiny_config

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.spec import GraphSpec
from optimum_neuron.tools.bench.measure import Bench, make_plan


def test_each_measurement_runs_what_it_says(
    cpu_artifact: Artifacts, open_runner: Callable[..., GraphRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_runner("llama", "cpu")
    ran: list[tuple[int, int]] = []
    step = runner.run_step

    def noted(chunks=(), decode=None, graph: GraphSpec | None = None, **options):  # type: ignore[no-untyped-def]
        ran.append((sum(len(each.token_ids) for each in chunks), 0 if decode is None else int(decode.active.sum())))
        return step(chunks, decode, graph, **options)

    monkeypatch.setattr(runner, "run_step", noted)
    advanced: list[str] = []
    bench = Bench(runner, Artifact.open(cpu_artifact("llama")).model, advanced.append)
    prefill = bench.measure_prefill(20, 2)
    # Two rows of chunks of 8 take 16 tokens in, then 4.
    assert ran == [(16, 0), (4, 0)] * 3
    assert (prefill.prompt_tokens, prefill.padding_share) == (20, 12 / 32)
    assert prefill.ttft_ms.min <= prefill.ttft_ms.median <= prefill.ttft_ms.max
    ran.clear()
    decode = bench.measure_decode(2, 8, 4, 2)
    assert ran == [(16, 0), *[(0, 2)] * 3] * 3
    assert (decode.rows, decode.context_tokens, decode.idle_share) == (2, 8, 1 / 3)
    assert decode.itl_p50_ms <= decode.itl_p99_ms
    assert decode.tokens_per_second == pytest.approx(2000 / decode.itl_p50_ms)
    assert len(advanced) == 6


def test_default_sizes_fit_the_artifact() -> None:
    plan = make_plan(tiny_config(), None, None, None, 8, 3)
    assert (plan.prompt_lengths, plan.rows, plan.context_length) == ((64,), (1, 2, 3), 57)
    few = tiny_config(batch_size=4, sequence_length=256, context_buckets=(256,), kv_block_size=64, kv_cache_tokens=512)
    # Four rows of 135 tokens take 12 blocks, and there are 8.
    assert make_plan(few, None, None, None, 8, 3).rows == (1, 2)
    with pytest.raises(ValueError, match="kv_cache_tokens=512"):
        make_plan(few, None, [4], None, 8, 3)


def test_a_report_is_printed_and_written(cpu_artifact: Artifacts, tmp_path: Path, cli: Cli) -> None:
    written = tmp_path / "bench.json"
    words = "--prompt-lengths 20 40 --batch 1 3 --context-length 8 --new-tokens 4 --repeat 2 --json"
    code, shown, _ = cli("neuron", "bench", cpu_artifact("llama"), *words.split(), written)
    told = ("Prefill, a prompt alone", "Decode, after 8 tokens a row", "medians of 2", "threads on")
    assert code == 0 and all(text in shown for text in told)
    report = json.loads(written.read_text())
    assert list(report) == [
        "format", "artifact", "digest", "config", "machine", "new_tokens", "repeat", "load_seconds", "warm_up_seconds", "memory", "prefill", "decode",
    ]  # fmt: skip
    assert (report["format"], report["config"]["target"], report["new_tokens"], report["repeat"]) == (1, "cpu", 4, 2)
    assert [row["prompt_tokens"] for row in report["prefill"]] == [20, 40]
    assert [(row["rows"], row["idle_share"]) for row in report["decode"]] == [(1, 2 / 3), (3, 0)]
    assert set(report["prefill"][0]) == {"prompt_tokens", "ttft_ms", "tokens_per_second", "padding_share"}
    assert set(report["decode"][0]["step_ms"]) == {"median", "min", "max"}
    assert report["memory"]["weights_bytes"] > 0 and report["memory"]["state_bytes"] > 0
    page = (Path(__file__).parents[3] / "docs" / "bench.md").read_text(encoding="utf-8")
    names = [*report, *report["machine"], *report["memory"], *report["prefill"][0], *report["decode"][0]]
    assert [name for name in names if f"`{name}`" not in page] == []
