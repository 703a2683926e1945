# SPDX-License-Identifier: Apache-2.0
"""The benchmark of servers without vLLM: what is asked of them, how they are run, and what is read from the results."""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmark import machine
from benchmark.http import serve
from benchmark.http.load import Arrival, Load, Mix, bench, bench_command, draw_arrivals, write_trace
from benchmark.http.report import SECTION, Results, summarize
from benchmark.http.servers import RunningServer, System, all_chunks_system, our_system, vllm_cpu_system


MIX = Mix(0.25, (1500, 2000), (50, 100), (32, 96))
# Answers /health, and leaves the pid of a child that would outlive it.
FAKE_SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def detailed(**changes: Any) -> dict[str, Any]:
    """Two requests as `vllm bench serve --save-detailed` has them."""
    result = {
        "duration": 2.0,
        "errors": ["", ""],
        "ttfts": [0.1, 0.3],
        "itls": [[0.01, 0.02], [0.03, 0.5]],
        "input_lens": [100, 50],
        "output_lens": [3, 3],
    }
    return result | changes


def results(**rounds: list[dict[str, Any]]) -> Results:
    options = {"dtype": "bfloat16", "long_share": 0.25, "long_prompt": [1500, 2000], "short_prompt": [50, 100]}
    options |= {"new_tokens": [32, 96], "repeats": 1, "slots": 8, "chunk_size": 128}
    machine = {"cpu": "a CPU", "threads": 2, "kernels": "avx2", "vllm": "0.32.0", "torch": "2.13.0"}
    found = Results("model.gguf", ["optimum_neuron", "all_chunks", "vllm_cpu"], options, machine)
    for system, each in rounds.items():
        for one in each:
            found.add("1 req/s", system, one)
    return found


def test_percentiles_are_over_single_pauses_of_all_rounds() -> None:
    numbers = summarize([detailed(), detailed(itls=[[0.04, 0.05], [0.06, 0.07]])])
    assert numbers["itl_p50_ms"] == pytest.approx(45)
    assert numbers["itl_max_ms"] == pytest.approx(500)
    assert numbers["itl_p99_ms"] == pytest.approx(70 + (500 - 70) * 0.93)
    assert numbers["ttft_p50_ms"] == pytest.approx(200)
    assert numbers["output_tok_s"] == pytest.approx(12 / 4)
    assert numbers["total_tok_s"] == pytest.approx((300 + 12) / 4)
    assert (numbers["requests"], numbers["failed"]) == (4, 0)


def test_a_failed_request_counts_as_failed_and_in_nothing_else() -> None:
    broken = detailed(errors=["", "closed"], ttfts=[0.1, 0.0], itls=[[0.01, 0.02], []], output_lens=[3, 0])
    numbers = summarize([broken])
    assert numbers["failed"] == 1
    assert numbers["ttft_p50_ms"] == pytest.approx(100)
    assert numbers["output_tok_s"] == pytest.approx(3 / 2)
    assert numbers["total_tok_s"] == pytest.approx(103 / 2)


def test_tokens_that_came_in_one_message_are_told() -> None:
    assert summarize([detailed()])["tokens_a_message"] == 1
    assert summarize([detailed(output_lens=[6, 6])])["tokens_a_message"] == 2


def test_a_load_of_which_every_request_failed_is_an_error_with_the_clients_reason() -> None:
    broken = detailed(errors=["Traceback\nConnectionResetError: gone", "x"], output_lens=[0, 0], itls=[[], []])
    with pytest.raises(RuntimeError, match="all 2 requests failed: ConnectionResetError: gone"):
        summarize([broken])


def test_this_project_is_compared_by_its_defaults_for_times_and_for_throughput() -> None:
    slow = detailed(itls=[[0.04, 0.08], [0.12, 2.0]], duration=4.0)
    rows = list(SECTION.compared(results(optimum_neuron=[slow], all_chunks=[detailed()]).to_dict()))
    lost = {row.what: row.lost() for row in rows}
    assert {row.group for row in rows} == {"1 req/s"} and lost["TTFT p50 ms"] == {}
    for what, times in (("ITL p50 ms", 4), ("ITL max ms", 4), ("new tok/s", 2)):
        assert list(lost[what].values()) == [pytest.approx(times)]


def test_json_has_the_numbers_of_each_round_and_no_single_pauses() -> None:
    report = results(optimum_neuron=[detailed(), detailed(duration=1.0)], all_chunks=[detailed()]).to_dict()
    assert "itls" not in json.dumps(report)
    assert [one["output_tok_s"] for one in report["rounds"]["1 req/s"]["optimum_neuron"]] == [3.0, 6.0]
    assert report["numbers"]["1 req/s"]["optimum_neuron"]["output_tok_s"] == pytest.approx(4)


def test_systems_are_shown_in_one_order_whoever_was_measured_first() -> None:
    found = results(vllm_cpu=[detailed()], all_chunks=[detailed()], optimum_neuron=[detailed()])
    assert list(found.numbers()["1 req/s"]) == ["optimum_neuron", "all_chunks", "vllm_cpu"]


def test_tables_and_picture_show_every_system(capsys: pytest.CaptureFixture[str]) -> None:
    report = results(optimum_neuron=[detailed()], all_chunks=[detailed()], vllm_cpu=[detailed()]).to_dict()
    SECTION.show(report)
    shown = capsys.readouterr().out
    assert SECTION.picture is not None
    drawn = SECTION.picture(report).svg()
    for system in ("this project", "this project, whole prompts in a step", "vLLM&#x27;s CPU backend"):
        assert system.replace("&#x27;", "'") in shown and system in drawn


def test_a_load_has_its_share_of_long_prompts_at_random_places() -> None:
    arrivals = draw_arrivals(Load(40, 2.0), MIX, seed=3)
    long_ones = [number for number, one in enumerate(arrivals) if one.prompt >= 1500]
    assert len(long_ones) == 10
    assert len({later - earlier for earlier, later in pairwise(long_ones)}) > 1
    assert all(1500 <= one.prompt <= 2000 or 50 <= one.prompt <= 100 for one in arrivals)
    assert all(32 <= one.new_tokens <= 96 for one in arrivals)
    assert len({one.new_tokens for one in arrivals}) > 10


def test_requests_come_at_their_rate_from_the_start_on_and_all_systems_get_the_same_ones() -> None:
    arrivals = draw_arrivals(Load(4000, 2.0), MIX, seed=3)
    assert arrivals[0].at == 0
    assert all(earlier.at <= later.at for earlier, later in pairwise(arrivals))
    assert arrivals[-1].at == pytest.approx(2000, rel=0.1)
    assert arrivals == draw_arrivals(Load(4000, 2.0), MIX, seed=3)
    assert arrivals != draw_arrivals(Load(4000, 2.0), MIX, seed=4)


def test_clients_without_a_rate_send_at_once_and_are_limited_in_number(tmp_path: Path) -> None:
    load = Load(12, None, 4)
    arrivals = draw_arrivals(load, MIX, seed=1)
    assert {one.at for one in arrivals} == {0}
    command = bench_command("python", "http://here", tmp_path, load, arrivals, tmp_path / "a.jsonl")
    assert command[command.index("--max-concurrency") + 1] == "4"
    assert "--no-self-timed" in command
    timed = bench_command("python", "http://here", tmp_path, Load(12, 1.0), arrivals, tmp_path / "a.jsonl")
    assert "--max-concurrency" not in timed
    assert "--no-self-timed" not in timed


def test_no_two_prompts_of_a_trace_share_a_prefix_and_each_is_drawn_from_one_hash(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    arrivals = [Arrival(0.0, 70, 8), Arrival(1.5, 1800, 8)]
    write_trace(arrivals, trace)
    lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    assert [line["hash_ids"] for line in lines] == [[0], [1]]
    assert lines[1] == {"timestamp": 1.5, "input_length": 1800, "output_length": 8, "hash_ids": [1]}
    command = bench_command("python", "http://here", tmp_path, Load(2, 1.0), arrivals, trace)
    assert int(command[command.index("--timed-trace-chunk-hash-size") + 1]) >= 1800


def test_a_client_that_fails_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    client = tmp_path / "python"
    client.write_text("#!/bin/sh\necho begun\necho 'ValueError: no such model' >&2\nexit 3\n", encoding="utf-8")
    client.chmod(0o755)
    with pytest.raises(RuntimeError, match="exit code 3: ValueError: no such model"):
        bench(str(client), "http://here", tmp_path, Load(1, 1.0), [Arrival(0.0, 8, 8)], tmp_path / "trace.jsonl")


def test_systems_differ_in_what_is_compared_only(tmp_path: Path) -> None:
    ours, incumbent = our_system(tmp_path), all_chunks_system(tmp_path, 4008)
    assert incumbent.command == (*ours.command, "--max-num-batched-tokens", "4008")
    assert incumbent.environment == ours.environment
    peer = vllm_cpu_system(tmp_path / "bin" / "python", "checkpoint", "bfloat16", 8, 2304)
    for system in (ours, peer):
        assert "--no-enable-prefix-caching" in system.command
    assert {"2304", "8", "bfloat16"} <= set(peer.command)
    assert "LD_PRELOAD" not in peer.environment
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    peer = vllm_cpu_system(tmp_path / "bin" / "python", "checkpoint", "bfloat16", 8, 2304)
    assert peer.environment["LD_PRELOAD"] == str(tmp_path / "lib" / "libiomp5.so")


def test_a_server_is_ready_when_it_answers_and_leaves_no_process_behind(tmp_path: Path) -> None:
    child = tmp_path / "child"
    system = System("fake", (sys.executable, "-c", FAKE_SERVER, str(child)))
    with RunningServer(system, tmp_path / "fake.log") as server:
        server.check()
        assert server.url.startswith("http://127.0.0.1:")
        pid = int(child.read_text(encoding="ascii"))
        os.kill(pid, 0)
    assert ends(pid)


def ends(pid: int) -> bool:
    """Whether a killed process goes; one that nobody has waited for yet is a zombie, and counts as gone."""
    for _ in range(600):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        stat = Path(f"/proc/{pid}/stat")
        if stat.is_file() and stat.read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_a_server_that_dies_while_it_starts_is_an_error_with_its_reason(tmp_path: Path) -> None:
    code = "print('ValueError: --dtype float16 is not there'); print('bye'); raise SystemExit(7)"
    system = System("fake", (sys.executable, "-c", code))
    reason = "server fake ended with exit code 7: ValueError: --dtype float16 is not there"
    with pytest.raises(RuntimeError, match=reason), RunningServer(system, tmp_path / "fake.log"):
        pass


def test_a_server_that_dies_later_is_an_error_too(tmp_path: Path) -> None:
    system = System("fake", (sys.executable, "-c", FAKE_SERVER, str(tmp_path / "child")))
    with RunningServer(system, tmp_path / "fake.log") as server:
        assert server._process is not None
        server._process.kill()
        server._process.wait()
        with pytest.raises(RuntimeError, match="server fake ended with exit code -9"):
            server.check()


def test_a_python_without_vllm_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["serve.py"])
    with pytest.raises(SystemExit) as ended:
        serve.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: vLLM is not installed for")
    assert "make bench-vllm" in said


def test_an_interpreter_without_the_peer_is_refused() -> None:
    with pytest.raises(ImportError, match="has no no-such-package"):
        machine.version_of(Path(sys.executable), "no-such-package")
