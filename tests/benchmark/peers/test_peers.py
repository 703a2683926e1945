# SPDX-License-Identifier: Apache-2.0
"""The comparison with other runtimes without any of them: order of turns, answers, peers that fail, tables; and llama.cpp's checkpoint."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tiny import TINY_SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from benchmark.machine import Limits
from benchmark.peers import __main__ as peers
from benchmark.peers.checkpoints import write_gguf
from benchmark.peers.measure import Runner
from benchmark.peers.names import FLOATS, OURS, PEERS, Environment, Peer
from benchmark.peers.prepare import INSTALLED, UnavailableError, python_of
from benchmark.peers.process import Place, Worker, WorkerError
from benchmark.peers.report import SECTION, cell
from benchmark.peers.results import FIRST_TOKEN, LOAD, PEAK, Case, Group, Prompts, Shape, agreed, cases, longest_row
from benchmark.peers.workers.protocol import Prompt, UnsupportedError
from benchmark.peers.workers.stepping import SteppingRuntime, spare_steps


ROOT = Path(__file__).resolve().parents[3]
PREFILL, DECODE, SERVE = CASES = (Case("prefill", 1, 8, 1), Case("decode", 2, 8, 3), Case("serve", 2))
CHECKS = ([[1, 2], [3]], [[3] * 16, [4] * 16])
SIZES = {"batches": [1, 2], "slots": 2, "length": 64}
LOADING: dict[str, Any] = {"checkpoint": "", "folder": "", "precision": "float32", "threads": 1, "sizes": SIZES}


def start(way: str, folder: Path, limit_s: float = 60.0) -> Worker:
    command = [sys.executable, str(Path(__file__).with_name("fake_worker.py")), way]
    return Worker(way, command, os.environ | {"PYTHONPATH": str(ROOT)}, folder / f"{way}.log", limit_s)


class FakePlace(Place):
    """A fake worker, by its way."""

    def start(self) -> Worker:
        return start(self.peer.name, self.log.parent)


def runner(folder: Path, *ways: str, **options: Any) -> Runner:
    places = {way: FakePlace(Peer(way, way, (way,)), Path(), LOADING, folder / way) for way in ways}
    return Runner(Group("fake", "float32", CASES), places, Prompts(10), settling_s=0, **options)


SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=8, linear_weights=1000, head_weights=500, vocab_size=10)


@pytest.mark.parametrize(
    ("together", "order"),
    [
        # Each case goes round all peers; another begins each round.
        (True, "a+ b+ b+ a+ ap bp bp ap ad bd bd ad as bs bs as"),
        # A peer starts and takes all cases before the next.
        (False, "a+ ap ad as b+ bp bd bs b+ bp bd bs a+ ap ad as"),
    ],
)
def test_all_peers_take_turns_and_all_figures_come_from_the_rounds(together: bool, order: str, tmp_path: Path) -> None:
    taken: list[str] = []
    running = runner(tmp_path, "a", "b", checks=CHECKS, advance=taken.append)
    running.run_rounds(2, together=together)
    names = {case.figure: case.kind[0] for case in CASES} | {"start": "+"}
    assert " ".join(f"{peer}{names[what]}" for peer, what in (each.split(": ") for each in taken)) == order
    group = running.group
    assert not running._workers and group.reasons == {} and group.versions["a"] == {"fake": "1"}
    assert group.values[PREFILL.figure]["a"] == [(16.0, None)] * 2
    assert group.values[DECODE.figure]["b"] == [(250.0, None)] * 2
    assert all(len(group.values[figure]["a"]) == 2 for figure in (SERVE.figure, LOAD, FIRST_TOKEN, PEAK))
    assert group.agreement == {"a": 0.5, "b": 0.5}  # the second prompt's sum is 3, not 4


def test_tokens_agree_up_to_the_first_other_one_and_prompts_are_the_same_for_all_peers_and_never_again() -> None:
    assert agreed([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == pytest.approx(6 / 8)
    prompts = Prompts(100)
    assert prompts.rows(DECODE, 0) == prompts.rows(DECODE, 0)
    drawn = [str(prompts.rows(case, when)) for case in CASES[:2] for when in (0, 1, "warm")]
    assert len(set(drawn)) == len(drawn)
    assert all(len(row) == DECODE.prompt and max(row) < 100 for row in prompts.rows(DECODE, 0))
    assert prompts.requests(SERVE, 0) == prompts.requests(SERVE, 0) != prompts.requests(SERVE, 1)


def test_every_row_of_every_case_fits() -> None:
    for prompts, batches in (([16], [1]), ([2048], [1, 32]), ([128], [200])):
        longest = longest_row(prompts, batches)
        assert longest % 256 == 0
        for case in cases(prompts, batches, [4]):
            assert case.prompt + case.new_tokens + spare_steps(case.rows) * (case.kind == "decode") <= longest


def test_a_worker_answers_whatever_its_libraries_print_and_one_that_hangs_is_ended(tmp_path: Path) -> None:
    worker = start("well", tmp_path)
    arguments = {"checkpoint": "", "folder": "", "sizes": SIZES}
    assert worker.versions == {"fake": "1"}
    assert worker.ask("convert", precision="int8", **arguments) == {"seconds": 2.0}
    with pytest.raises(UnsupportedError, match="no int4"):
        worker.ask("convert", precision="int4", **arguments)
    with pytest.raises(WorkerError, match="a worker cannot 'dance'") as failed:
        worker.ask("dance")
    assert failed.value.alive
    assert worker.peak_bytes() > 1 << 20
    worker.close()
    worker = start("hangs", tmp_path, limit_s=1.0)
    with pytest.raises(WorkerError, match=r"hangs did not answer in 1 s") as failed:
        worker.ask("generate", prompts=[[1]], new_tokens=1)
    assert not failed.value.alive
    worker.close()
    with pytest.raises(WorkerError, match=r"odd answered b'hello', which is no JSON object"):
        Worker("odd", [sys.executable, "-c", "print('hello')"], os.environ, tmp_path / "odd.log")


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("short", "2 requests, new tok/s: short gave "),
        ("no import", "start: no import ended with exit code 1: ImportError: no such runtime"),
        ("no load", "start: no load failed: RuntimeError: the file is broken"),
        ("dies", "decode x 2, ms/step: dies ended with exit code 3: fatal Error: out of memory"),
        ("no requests", "2 requests, new tok/s: rows of a batch begin and end together: it does not serve requests of mixed lengths"),
    ],
)  # fmt: skip
def test_a_peer_that_fails_is_named_and_the_others_are_measured(way: str, reason: str, tmp_path: Path) -> None:
    running = runner(tmp_path, way, "well", checks=CHECKS)
    running.run_rounds(2, together=True)
    group = running.group
    assert group.reasons.keys() == {way} and group.reasons[way][0].startswith(reason)
    assert all("well" in group.values[case.figure] for case in CASES)
    assert all(len(values) == 2 for values in group.values[DECODE.figure].values())
    assert way not in group.values.get(SERVE.figure, {})


INSTALLER = """#!/bin/sh
[ "$2" = venv ] && mkdir -p "$3/bin" && exec cp "$0" "$3/bin/python"
echo "ERROR: $4 is no wheel"
exit 1
"""


def test_what_does_not_install_has_a_reason_and_another_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installer = tmp_path / "python"
    installer.write_text(INSTALLER)
    installer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(installer))
    peer = Peer("lost", "lost", ("lost",), FLOATS, Environment(("nothing.whl",)))
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"^not installed: .*nothing\.whl.* \(see .*lost\.log\)"):
            python_of(peer, tmp_path, avx2=False)
    assert not (tmp_path / "lost" / INSTALLED).exists()
    # One that is there is used again, and another one for avx2.
    always, avx2 = {"CXXFLAGS": "-O2"}, {"CMAKE_ARGS": "-DX=1"}
    peer = Peer("made", "made", ("made",), FLOATS, Environment((), variables=always, avx2=avx2))
    for name, variables in (("made", always), ("made-avx2", always | avx2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / INSTALLED).write_text(json.dumps({"packages": [], "variables": variables}))
        assert python_of(peer, tmp_path, avx2=variables != always) == tmp_path / name / "bin" / "python"
    assert python_of(Peer("here", "here", ("here",)), tmp_path, avx2=True) == installer


def test_what_takes_longer_is_the_limit_and_of_two_measurements_the_higher() -> None:
    first, second = Limits(2.0, {"float32": 1.0, "bfloat16": 5.0}), Limits(1.0, {"float32": 3.0, "bfloat16": 4.0})
    assert first.best(second) == second.best(first) == Limits(2.0, {"float32": 3.0, "bfloat16": 5.0})
    prefill, decode = Case("prefill", 1, 100, 1), Case("decode", 1, 10, 2)
    group = Group("a-model", "bfloat16", [prefill, decode, SERVE])
    for case in group.cases:
        group.add(case.figure, OURS, 100.0)
    limits = Limits(100.0, {"float32": 1.0, "bfloat16": 1e3})
    computed = (2 * (1000 * 100 + 500) + 2 * 2 * 4 * 8 * 100**2) / 1e3 / (100 / 100)
    read = (1500 * 2 + 11 * 2 * 2 * 8 * 2 * 2) / 100 / (100 / 1e3)
    assert group.share(prefill.figure, OURS, limits, SHAPE) == pytest.approx(computed)
    assert group.share(decode.figure, OURS, limits, SHAPE) == pytest.approx(read)
    figures = group.to_dict(limits, SHAPE)["figures"]
    assert list(figures) == [case.figure for case in group.cases] and figures[SERVE.figure][OURS]["share"] is None
    assert cell({"median": 30.0, "share": 0.17}) == "30.0 (17%)" and cell({"median": 200.0, "share": None}) == "200"


def test_a_decode_step_is_held_to_the_rate_of_memory_right_before_it(tmp_path: Path) -> None:
    rates = iter([2e9, 1e9, 4e9])
    running = runner(tmp_path, "good", read_rate=lambda: next(rates))
    running.run_rounds(3, together=True)
    assert running.group.values[DECODE.figure]["good"] == [(250.0, rate) for rate in (2e9, 1e9, 4e9)]
    limits, group = Limits(8e9, {"float32": 1e12}), running.group
    group.values[DECODE.figure]["good"] = [(10.0, 2e9), (20.0, 1e9), (6.0, 4e9)]
    bytes_read = SHAPE.weights * 4 + 2 * (8 + 1.5) * 2 * 2 * 8 * 2 * 4
    # Of two equal ones and a lower one; by the best rate it would be a fourth.
    assert group.share(DECODE.figure, "good", limits, SHAPE) == pytest.approx(bytes_read / 2e9 / 0.01)


@pytest.mark.slow
def test_this_project_is_measured_without_torch_and_gives_the_tokens_of_transformers(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    own = {"checkpoint": str(tiny_checkpoint), "folder": str(tmp_path / "exports")}
    place = Place(PEERS[OURS], Path(sys.executable), LOADING | own, tmp_path / "log")
    place.convert()
    prompts = [[5, 6, 7], [8, 9, 10]]
    with closing(place.start()) as worker:
        worker.ask("load", **place.loading)
        found = [worker.ask("generate", prompts=rows, new_tokens=4)["tokens"] for rows in (prompts[:1], prompts)]
        assert worker.ask("serve", requests=[[[5], 4], [[8, 9], 3], [[1, 2, 3], 2]])["tokens"] == 9
        assert "libtorch" not in Path(f"/proc/{worker._process.pid}/maps").read_text()
    model = LlamaForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    expected = model.generate(torch.tensor(prompts), max_new_tokens=4, do_sample=False, eos_token_id=None)[
        :, 3:
    ].tolist()
    assert found == [expected[:1], expected]


class Steps(SteppingRuntime):
    """An engine whose second request begins two steps late."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.count = 0

    def versions(self) -> dict[str, str]:
        return {}

    def load(self, *_: Any) -> None: ...

    def add_request(self, prompt: Prompt, new_tokens: int) -> list[int]:
        self.rows.append([])
        return self.rows[-1]

    def step(self) -> None:
        for late, row in enumerate(self.rows):
            row.extend([self.count] if self.count >= 2 * late else [])
        self.count += 1

    def is_busy(self) -> bool:
        return self.count < 4 and bool(self.rows)

    def cancel(self) -> None:
        self.rows = []


def test_steps_are_timed_once_all_rows_have_begun_and_until_the_last_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Steps()
    monkeypatch.setattr(time, "perf_counter", lambda: float(engine.count))  # a second a step
    generated = engine.generate([[1], [2]], 3)
    assert generated.tokens == [[0, 1, 2], [2, 3, 4]] and not engine.rows
    assert (generated.first_s, generated.rest_s) == (3.0, 2.0)
    assert engine.count == 5 <= 3 + spare_steps(2)
    assert Steps().serve([([1], 4), ([2], 2)]) == 6


def test_a_run_is_shown_with_its_reasons_notes_and_limits(capsys: pytest.CaptureFixture[str]) -> None:
    group = Group("a-model", "float32", CASES)
    for peer, prefill, decode in ((OURS, 200.0, 10.0), ("llamacpp", 100.0, 30.0)):
        group.add(PREFILL.figure, peer, prefill)
        group.add(DECODE.figure, peer, decode)
    group.explain("vllm", "has no int8")
    report = {
        "machine": {"cpu": "a CPU", "threads": 2, "kernels": "avx2"}, "notes": ["a note"],
        "options": {"peers": ["llamacpp", "openvino", "vllm"], "rounds": 3}, "missing": {"openvino": "not installed: no wheel"},
        "limits": {"read": 3e10, "products": {"float32": 4e11, "bfloat16": 2e12}},
        "groups": [group.to_dict(Limits(3e10, {"float32": 4e11}), SHAPE)],
    }  # fmt: skip
    SECTION.finish(report, None)
    shown = capsys.readouterr().out
    for text in ("30.0 (0%)", "vLLM (CPU): has no int8", "OpenVINO: not installed: no wheel", "a note", "30.0 GB/s"):
        assert text in shown
    assert "Won, a-model, float32: 2 of 2 rows." in shown


def test_bad_options_are_refused_quick_asks_for_less_and_named_options_win(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, message in (
        ("--threads 4096", "--threads 4096 is more than the"), ("--rounds 0", "'0' is not a whole number of at least 1"),
        ("--peers ollama", "invalid choice: 'ollama'"), ("--instruction-set sse", "invalid choice: 'sse'"),
    ):  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["peers", *options.split()])
        with pytest.raises(SystemExit):
            peers.parse_arguments()
        assert message in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["peers", "--quick", "--rounds", "7", "--batches", "8", "1", "8"])
    args = peers.parse_arguments()
    assert (args.rounds, args.batches, args.models) == (7, [1, 8], ["smollm2-135m"])


def test_bfloat16_weights_of_llamas_alone_keep_their_bits_and_names(tmp_path: Path) -> None:
    config = LlamaConfig(**TINY_SIZES, dtype="bfloat16")
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(write_gguf(tmp_path)).tensors}
    weights = load_file(tmp_path / "model.safetensors")
    assert len(weights) == len(found)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in weights.items():
        tensor = found[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
        assert tuple(reversed(tensor.shape.tolist())) == tuple(weight.shape)
        if weight.dim() == 1:
            assert torch.equal(torch.tensor(tensor.data), weight.float())
        elif name.endswith("v_proj.weight") or "embed" in name:
            assert torch.equal(torch.tensor(tensor.data).view(torch.bfloat16), weight)
    # a head's rows 0, 8, 1, 9, ...: the pairs that are rotated together lie side by side
    query = torch.tensor(found["blk.0.attn_q.weight"].data).view(torch.bfloat16)
    rows = [half + pair for pair in range(8) for half in (0, 8)]
    assert torch.equal(query[16:32], weights["model.layers.0.self_attn.q_proj.weight"][16:32][rows])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    with pytest.raises(ValueError, match="model_type llama, not 'gpt2'; leave out the peer llamacpp"):
        write_gguf(tmp_path)
