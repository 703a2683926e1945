# SPDX-License-Identifier: Apache-2.0
"""The comparison with other runtimes without any of them: order of turns, answers, peers that fail, tables."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmark.limits import Limits
from benchmark.peers import __main__ as peers
from benchmark.peers.environments import STAMP, UnavailableError, python_of
from benchmark.peers.measure import Runner
from benchmark.peers.models import Needs, Shape
from benchmark.peers.names import FLOATS, OURS, WHOLE_TILE_CONFIG, Environment, Peer
from benchmark.peers.prepare import live_together
from benchmark.peers.process import Worker, WorkerError
from benchmark.peers.report import SECTION, cell
from benchmark.peers.results import FIRST_TOKEN, LOAD, PEAK, Group, agreed
from benchmark.peers.schedule import Case, Prompts, Turn, cases, longest_row, turns
from benchmark.peers.workers.protocol import Generated, UnsupportedError
from benchmark.peers.workers.stepping import spare_steps, timed_steps


ROOT = Path(__file__).resolve().parents[3]
PREFILL, DECODE, SERVE = CASES = (Case("prefill", 1, 8, 1), Case("decode", 2, 8, 3), Case("serve", 2))
LOADING: dict[str, Any] = {
    "folder": "",
    "precision": "float32",
    "threads": 1,
    "sizes": {"batches": [1, 2], "length": 64},
}


def start(way: str, folder: Path, limit_s: float = 60.0) -> Worker:
    command = [sys.executable, str(Path(__file__).with_name("fake_worker.py")), way]
    return Worker(way, command, os.environ | {"PYTHONPATH": str(ROOT)}, folder / f"{way}.log", limit_s)


def measured(folder: Path, *ways: str, together: bool = True, rounds: int = 2) -> Group:
    group = Group("fake", "float32", list(CASES))
    checks = ([[1, 2], [3]], [[3] * 16, [4] * 16])
    runner = Runner(
        group, lambda way: start(way, folder), dict.fromkeys(ways, LOADING), Prompts(10, 0), checks, settling_s=0
    )
    runner.run(turns(ways, CASES, rounds, together))
    return group


def filled() -> Group:
    group = Group("a-model", "float32", list(CASES))
    for peer, prefill, decode in ((OURS, 200.0, 10.0), ("llamacpp", 100.0, 30.0)):
        group.add(PREFILL.figure, peer, prefill)
        group.add(DECODE.figure, peer, decode)
    group.limits = Limits(2e9, {"float32": 1e9, "bfloat16": 5e9})
    group.needs = {PREFILL.figure: Needs(1.0, 1e7), DECODE.figure: Needs(1e7, 1.0)}
    return group


def test_together_each_case_goes_round_all_peers_and_another_begins_each_round() -> None:
    order = list(turns(["a", "b", "c"], CASES[:2], 2, together=True))
    starts, measured = order[:6], order[6:]
    assert [(turn.peer, turn.case) for turn in starts] == [(peer, None) for peer in "abcbca"]
    assert [(turn.case, turn.peer) for turn in measured] == [(case, peer) for case in CASES[:2] for peer in "abcbca"]
    # the workers of the last start stay until their last case
    assert [turn.last for turn in order] == [True] * 3 + [False] * 12 + [True] * 3


def test_one_at_a_time_a_peer_starts_and_takes_all_cases_before_the_next() -> None:
    order = list(turns(["a", "b"], CASES, 2, together=False))
    assert "".join(turn.peer for turn in order) == "aaaabbbbbbbbaaaa"
    assert [turn.case for turn in order] == [None, *CASES] * 4
    assert [turn.last for turn in order] == [False, False, False, True] * 4


def test_prompts_are_the_same_for_all_peers_and_never_again() -> None:
    prompts = Prompts(100, seed=1)
    assert prompts.rows(DECODE, 0) == prompts.rows(DECODE, 0)
    drawn = [str(prompts.rows(case, when)) for case in CASES[:2] for when in (0, 1, "warm")]
    assert len(set(drawn)) == len(drawn)
    assert all(len(row) == DECODE.prompt and max(row) < 100 for row in prompts.rows(DECODE, 0))
    assert prompts.requests(SERVE, 0) == prompts.requests(SERVE, 0) != prompts.requests(SERVE, 1)
    assert prompts.rows(DECODE, 0) != Prompts(100, seed=2).rows(DECODE, 0)


def test_every_row_of_every_case_fits() -> None:
    for prompts, batches in (([16], [1]), ([2048], [1, 32]), ([128], [200])):
        longest = longest_row(prompts, batches)
        assert longest % 256 == 0
        for case in cases(prompts, batches, 4):
            assert case.prompt + case.new_tokens + spare_steps(case.rows) * (case.kind == "decode") <= longest


def test_a_worker_answers_whatever_its_libraries_print(tmp_path: Path) -> None:
    worker = start("well", tmp_path)
    arguments = {"checkpoint": "", "folder": "", "sizes": LOADING["sizes"]}
    assert worker.versions == {"fake": "1"}
    assert worker.ask("convert", precision="int8", **arguments) == {"seconds": 2.0}
    with pytest.raises(UnsupportedError, match="no int4"):
        worker.ask("convert", precision="int4", **arguments)
    with pytest.raises(WorkerError, match="a worker cannot 'dance'") as failed:
        worker.ask("dance")
    assert failed.value.alive
    assert worker.peak_bytes() > 1 << 20
    worker.close()


def test_all_figures_come_from_the_rounds(tmp_path: Path) -> None:
    for together in (True, False):
        group = measured(tmp_path, "well", "other", together=together)
        assert group.reasons == {}
        assert group.values[PREFILL.figure]["well"] == [16.0, 16.0]
        assert group.values[DECODE.figure]["other"] == [250.0, 250.0]
        assert all(len(group.values[figure]["well"]) == 2 for figure in (SERVE.figure, LOAD, FIRST_TOKEN, PEAK))
        assert group.agreement == {"well": 0.5, "other": 0.5}  # the second prompt's sum is 3, not 4
        assert group.versions["well"] == {"fake": "1"}


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("no import", r"start: no import ended with exit code 1: ImportError: no such runtime"),
        ("no load", r"start: no load failed: RuntimeError: the file is broken"),
        ("dies", r"decode x 2, ms/step: dies ended with exit code 3: fatal Error: out of memory"),
        ("no requests", r"2 requests, new tok/s: it serves no requests"),
    ],
)
def test_a_peer_that_fails_is_named_and_the_others_are_measured(way: str, reason: str, tmp_path: Path) -> None:
    group = measured(tmp_path, way, "well")
    assert group.reasons == {way: [reason]}
    assert all("well" in group.values[case.figure] for case in CASES)
    assert all(len(values) == 2 for values in group.values[DECODE.figure].values())
    assert way not in group.values.get(SERVE.figure, {})


def test_a_peer_that_gives_other_numbers_of_tokens_has_no_figure(tmp_path: Path) -> None:
    group = measured(tmp_path, "short", rounds=1)
    assert "short gave" in group.reasons["short"][0] and SERVE.figure not in group.values


def test_a_peer_that_hangs_is_ended(tmp_path: Path) -> None:
    worker = start("hangs", tmp_path, limit_s=3.0)
    with pytest.raises(WorkerError, match=r"hangs did not answer in 3 s") as failed:
        worker.ask("generate", prompts=[[1]], new_tokens=1)
    assert not failed.value.alive
    worker.close()


def test_an_answer_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"odd answered b'hello', which is no JSON object"):
        Worker("odd", [sys.executable, "-c", "print('hello')"], os.environ, tmp_path / "odd.log")


def test_what_does_not_install_is_named_with_its_reason_and_tried_again(tmp_path: Path) -> None:
    peer = Peer("lost", "lost", ("lost",), FLOATS, Environment((str(tmp_path / "nothing.whl"),)))
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"^not installed: .*nothing\.whl.* \(see .*lost\.log\)"):
            python_of(peer, tmp_path, avx2=False)
    assert not (tmp_path / "lost" / STAMP).exists()


def test_an_environment_is_made_once_and_another_one_for_avx2(tmp_path: Path) -> None:
    always, avx2 = {"CXXFLAGS": "-O2"}, {"CMAKE_ARGS": "-DX=1"}
    peer = Peer("made", "made", ("made",), FLOATS, Environment((), variables=always, avx2=avx2))
    for name, variables in (("made", always), ("made-avx2", always | avx2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / STAMP).write_text(json.dumps({"packages": [], "variables": variables}))
        assert python_of(peer, tmp_path, avx2=variables != always) == tmp_path / name / "bin" / "python"
    assert python_of(Peer("here", "here", ("here",)), tmp_path, avx2=True) == Path(sys.executable)


def test_ratios_above_one_are_better_and_shares_are_of_the_limit() -> None:
    group = filled()
    assert group.ratio(PREFILL.figure, "llamacpp") == 2
    assert group.ratio(DECODE.figure, "llamacpp") == 3
    assert group.share(PREFILL.figure, OURS) == pytest.approx(0.25)
    assert group.share(DECODE.figure, OURS) == pytest.approx(0.5)
    assert group.ratio(SERVE.figure, "llamacpp") is group.share(SERVE.figure, "llamacpp") is None
    figures = group.to_dict()["figures"]
    assert cell(figures[DECODE.figure]["llamacpp"]) == "30.0 (17%)"
    assert cell(figures[PREFILL.figure][OURS]) == "200 (25%)"


def test_what_takes_longer_is_the_limit_reading_or_computing() -> None:
    group = Group("a-model", "bfloat16", [Case("prefill", 1, 100, 1), Case("decode", 1, 10, 2)])
    shape = Shape(layers=2, heads=4, kv_heads=2, head_dim=8, linear_weights=1000, head_weights=500, vocab_size=10)
    for case in group.cases:
        group.add(case.figure, OURS, 100.0)
    assert group.share(group.cases[0].figure, OURS) is None  # before the limits are known
    group.set_limits(Limits(100.0, {"float32": 1.0, "bfloat16": 1e3}), shape)
    prefill, decode = (group.share(case.figure, OURS) for case in group.cases)
    assert prefill == pytest.approx((2 * (1000 * 100 + 500) + 2 * 2 * 4 * 8 * 100**2) / 1e3 / (100 / 100))
    assert decode == pytest.approx((1500 * 2 + 11 * 2 * 2 * 8 * 2 * 2) / 100 / (100 / 1e3))


def test_a_decode_step_is_held_to_the_rate_of_memory_right_before_it(tmp_path: Path) -> None:
    rates = iter([2e9, 1e9, 4e9])
    group = Group("fake", "float32", list(CASES))
    runner = Runner(
        group,
        lambda way: start(way, tmp_path),
        {"good": LOADING},
        Prompts(10, 0),
        settling_s=0,
        read_rate=lambda: next(rates),
    )
    runner.run(turns(["good"], CASES, 3, True))
    assert group.reads == {DECODE.figure: {"good": [2e9, 1e9, 4e9]}}
    group.values[DECODE.figure]["good"] = [10.0, 20.0, 6.0]
    group.limits, group.needs = Limits(8e9, {"float32": 1e12}), {DECODE.figure: Needs(1e7, 1.0)}
    # Of 0.5, 0.5 and 0.42, where the best rate gives 0.125.
    assert group.share(DECODE.figure, "good") == pytest.approx(0.5)


def test_of_two_measurements_each_limit_is_the_higher() -> None:
    first, second = Limits(2.0, {"float32": 1.0, "bfloat16": 5.0}), Limits(1.0, {"float32": 3.0, "bfloat16": 4.0})
    assert first.best(second) == second.best(first) == Limits(2.0, {"float32": 3.0, "bfloat16": 5.0})


def test_tokens_agree_up_to_the_first_other_one() -> None:
    assert agreed([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == pytest.approx(6 / 8)


def test_steps_are_timed_once_all_rows_have_begun_and_until_the_last_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[list[int]] = [[], []]
    count = iter(range(100))

    def step() -> None:
        number = next(count)
        rows[0].append(number)
        rows[1].extend([number] if number >= 2 else [])

    monkeypatch.setattr(time, "perf_counter", lambda: float(len(rows[0])))  # a second a step
    generated: Generated = timed_steps(step, lambda: rows, 3, 0.0)
    assert generated.tokens == [[0, 1, 2], [2, 3, 4]]
    assert (generated.first_s, generated.rest_s) == (3.0, 2.0)
    assert len(rows[0]) == 5 <= 3 + spare_steps(2)


def test_workers_live_together_where_memory_has_room_for_all() -> None:
    assert live_together(135_000_000, 7, 32, 16 << 30)
    assert not live_together(1_200_000_000, 7, 32, 16 << 30)


def test_a_run_is_shown_with_its_reasons_notes_and_limits(capsys: pytest.CaptureFixture[str]) -> None:
    group = filled()
    group.explain("vllm", "has no int8")
    report = {
        "machine": {"cpu": "a CPU", "threads": 2, "kernels": "avx2"},
        "options": {"peers": ["llamacpp", "openvino", "vllm"], "rounds": 3},
        "missing": {"openvino": "not installed: no wheel"},
        "notes": ["a note"],
        "limits": {"read": 3e10, "products": {"float32": 4e11, "bfloat16": 2e12}},
        "groups": [group.to_dict()],
    }
    SECTION.show(report)
    shown = capsys.readouterr().out
    for text in ("30.0 (17%)", "vLLM (CPU): has no int8", "OpenVINO: not installed: no wheel", "a note", "30.0 GB/s"):
        assert text in shown
    assert "Won, a-model, float32: 2 of 2 rows." in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--threads", "4096"], "--threads 4096 is more than the"),
        (["--peers", "ollama"], "invalid choice: 'ollama'"),
        (["--rounds", "0"], "'0' is not a whole number of at least 1"),
        (["--instruction-set", "sse"], "invalid choice: 'sse'"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", *options])
    with pytest.raises(SystemExit):
        peers.parse_arguments()
    assert message in capsys.readouterr().err


def test_quick_asks_for_less_and_named_options_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", "--quick", "--rounds", "7", "--batches", "8", "1", "8"])
    args = peers.parse_arguments()
    assert (args.rounds, args.batches, args.models) == (7, [1, 8], ["smollm2-135m"])


def test_turns_of_no_cases_start_and_end_workers() -> None:
    assert list(turns(["a"], [], 1, together=False)) == [Turn(0, "a", None, last=True)]


@pytest.mark.skipif(shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs a g++ for x86-64")
def test_all_of_a_tile_configuration_is_written_before_it_is_loaded(tmp_path: Path) -> None:
    """GCC 12 leaves out what stands behind its first 8 bytes."""
    source = tmp_path / "config.cpp"
    source.write_text(
        "#include <immintrin.h>\n"
        "struct Config { unsigned char head[16]; unsigned short bytes[16]; unsigned char rows[16]; };\n"
        "void load() { alignas(64) Config config = {}; config.head[0] = 1; config.rows[7] = 113; _tile_loadconfig(&config); }\n"
    )
    flags = [*WHOLE_TILE_CONFIG["CXXFLAGS"].split(), "-mamx-tile", "-O3", "-S", "-o", "-"]
    made = subprocess.run(["g++", *flags, str(source)], capture_output=True, text=True, check=True).stdout
    assert "ldtilecfg" in made and "$113" in made
