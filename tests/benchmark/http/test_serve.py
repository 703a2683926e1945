# SPDX-License-Identifier: Apache-2.0
"""The benchmark of servers without vLLM: what is asked of them, how they are run, and what is read from the results."""

from __future__ import annotations

import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmark.http import results, serve
from benchmark.http.load import SERVED_NAME, Load, bench, bench_command, draw_requests


def client_result(scale: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Two requests as `vllm bench serve --save-detailed` has them."""
    result = {"completed": 2, "errors": ["", ""], "output_throughput": 30.0 / scale, "total_token_throughput": 90.0}
    times = {f"p{share}_{what}_ms": share * scale for share in (50, 99, 100) for what in ("ttft", "itl")}
    return {**result, **times, **changes}


def report(**rounds: list[dict[str, float]]) -> dict[str, Any]:
    options = Namespace(dtype="bfloat16", repeats=1, rates=[1.0], json=None)
    made = results.make_report("a/model.gguf", options, {"vllm": "0.32.0"}, {"1 req/s": rounds})
    return made | {"machine": {"cpu": "a CPU", "threads": 2, "kernels": "avx2"}}


def test_numbers_are_medians_of_rounds_and_failed_requests_are_counted() -> None:
    given = ((1, 0), (3, 2), (2, 1))
    rounds = [results.numbers_of(client_result(scale)) | {"failed": failed} for scale, failed in given]
    found = report(optimum_neuron=rounds)["numbers"]["1 req/s"]["optimum_neuron"]
    expected = {"itl_p50_ms": 100, "itl_p99_ms": 198, "itl_max_ms": 200, "ttft_p50_ms": 100, "output_tok_s": 15}
    assert found.items() >= (expected | {"failed": 3}).items()
    assert results.numbers_of(client_result(errors=["", "closed"], completed=1))["failed"] == 1
    broken = client_result(errors=["Traceback\nConnectionResetError: gone", "x"], completed=0)
    with pytest.raises(RuntimeError, match="all 2 requests failed: ConnectionResetError: gone"):
        results.numbers_of(broken)


def test_this_project_is_compared_by_its_defaults_and_all_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (results.numbers_of(client_result(scale)) for scale in (4, 1))
    run = report(vllm_cpu=[fast], all_chunks=[fast], optimum_neuron=[slow])
    assert list(run["numbers"]["1 req/s"]) == ["optimum_neuron", "all_chunks", "vllm_cpu"]
    lost = {row.what: row.lost() for row in results.SECTION.compared(run)}
    for what in ("TTFT p50 ms", "ITL max ms", "new tok/s"):
        assert list(lost[what].values()) == [pytest.approx(4)] * 2
    assert lost["all tok/s"] == {}
    results.SECTION.finish(run, None)
    shown = capsys.readouterr().out
    assert all(label in shown for label in results.LABELS.values())


def test_a_load_has_its_share_of_long_prompts_at_random_places_and_no_two_prompts_share_a_hash() -> None:
    requests = draw_requests(Load(40, 2.0), seed=3)
    lengths = [one["input_length"] for one in requests]
    long_ones = [number for number, length in enumerate(lengths) if length >= 1500]
    assert len(long_ones) == 10 and len({later - earlier for earlier, later in pairwise(long_ones)}) > 1
    assert all(1500 <= length <= 2000 or 50 <= length <= 100 for length in lengths)
    assert len({one["output_length"] for one in requests}) > 10
    assert [one["hash_ids"] for one in requests] == [[number] for number in range(40)]
    # They come at their rate from the start on, and all systems get the same ones.
    requests = draw_requests(Load(4000, 2.0), seed=3)
    times = [one["timestamp"] for one in requests]
    assert times[0] == 0 and times == sorted(times) and times[-1] == pytest.approx(2000, rel=0.1)
    assert requests == draw_requests(Load(4000, 2.0), seed=3) != draw_requests(Load(4000, 2.0), seed=4)


def test_clients_without_a_rate_send_at_once_and_are_limited_in_number(tmp_path: Path) -> None:
    load = Load(12, None, 4)
    assert {one["timestamp"] for one in draw_requests(load, seed=1)} == {0}
    command = bench_command("python", "http://here", tmp_path, load, tmp_path / "a.jsonl")
    assert command[command.index("--max-concurrency") + 1] == "4" and "--no-self-timed" in command
    timed = bench_command("python", "http://here", tmp_path, Load(12, 1.0), tmp_path / "a.jsonl")
    assert not {"--max-concurrency", "--no-self-timed"} & set(timed)
    assert int(timed[timed.index("--timed-trace-chunk-hash-size") + 1]) >= 2000
    # One that fails is an error with its last line.
    client = tmp_path / "python"
    client.write_text("#!/bin/sh\necho begun\necho 'ValueError: no such model' >&2\nexit 3\n", encoding="utf-8")
    client.chmod(0o755)
    with pytest.raises(RuntimeError, match="exit code 3: ValueError: no such model"):
        bench(str(client), "http://here", tmp_path, Load(1, 1.0), [], tmp_path / "trace.jsonl")


def test_systems_differ_in_what_is_compared_only_and_need_vllm(tmp_path: Path) -> None:
    ours, incumbent = serve.our_server(tmp_path, tmp_path), serve.all_chunks_server(tmp_path, 4008, tmp_path)
    assert [word for word in incumbent._command if word not in ours._command] == ["--max-num-batched-tokens", "4008"]
    assert incumbent._environment == ours._environment
    place = (tmp_path / "bin" / "python", "checkpoint", "bfloat16", 8, 2304, tmp_path)
    peer = serve.vllm_cpu_server(*place)
    for server in (ours, incumbent, peer):
        assert {"--no-enable-prefix-caching", SERVED_NAME} <= set(server._command)
    assert {"2304", "8", "bfloat16"} <= set(peer._command) and "LD_PRELOAD" not in peer._environment
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert serve.vllm_cpu_server(*place)._environment["LD_PRELOAD"] == str(tmp_path / "lib" / "libiomp5.so")
    with pytest.raises(ImportError, match=r"has no no-such-package; run `make bench-vllm`"):
        serve.version_of(Path(sys.executable), "no-such-package")
