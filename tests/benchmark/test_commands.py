# SPDX-License-Identifier: Apache-2.0
"""The benchmarks as commands that explain themselves and take what the documents show, and the parts that they share."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
import time
from argparse import ArgumentTypeError
from itertools import count
from pathlib import Path

import pytest

import benchmark
import optimum_neuron
from benchmark import machine, newcomer, options
from benchmark.model import _fingerprint, serving_config
from benchmark.server import RunningServer


ROOT = Path(__file__).resolve().parents[2]
NAMED = sorted(set(re.findall(r"python -m (benchmark[\w.]+)", benchmark.__doc__ or "")))
DOCUMENTS = [
    "Makefile", "README.md", "docs/results.md", "docs/bench.md", "docs/neuron.md", "AGENTS.md", "benchmark/README.md",
]  # fmt: skip


def test_the_package_names_every_command_and_no_folder_imports_another() -> None:
    folder = ROOT / "benchmark"
    files = [path for path in folder.rglob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in files}
    started = {module for module in modules if module.startswith("benchmark.peers.workers.")}
    assert modules == {*NAMED, *started}  # which others start
    folders = {path.parent.name for path in (ROOT / "benchmark").glob("*/__init__.py")}
    for path in (ROOT / "benchmark").glob("*/*.py"):
        text = path.read_text(encoding="utf-8")
        assert not set(re.findall(r"from (?:\.\.|benchmark\.)(\w+)", text)) & folders, path


@pytest.mark.parametrize("module", NAMED)
def test_help_has_what_is_told(
    module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = importlib.import_module(module)
    if hasattr(command, "__path__"):
        command = importlib.import_module(f"{module}.__main__")
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: python -m {module} " in shown and "examples:\n" in shown
    known = set(re.findall(r"--[a-z][a-z0-9-]*", shown.partition("examples:")[0]))
    typed = [shown, *((ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS)]
    commands = [line for text in typed for line in re.findall(rf"-m {re.escape(module)}(?: (.*))?$", text, re.M)]
    given = {word for line in commands for word in shlex.split(line.partition("`")[0], comments=True)}
    assert {word for word in given if word.startswith("--")} <= known


def test_documents_name_modules_that_exist() -> None:
    for name in [*DOCUMENTS, "ARCHITECTURE.md"]:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert set(re.findall(r"-m (benchmark[\w.]*\w)", text)) <= set(NAMED), name
        for path in re.findall(r"(?<!build/)(?<!tests/)benchmark/[\w./]*\.(?:py|png|md)", text):
            assert (ROOT / path).is_file(), f"{name}: {path}"


def test_rates_are_above_0_and_counts_are_whole_numbers_of_at_least_so_many() -> None:
    assert options.at_least(3)("3") == 3
    for text in ("0", "-1", "inf", "nan", "many"):
        with pytest.raises(ArgumentTypeError, match="is not a number above 0"):
            options.above_zero(text)
    for text in ("-1", "1.0", "1e3", "", " 1", "2"):
        with pytest.raises(ArgumentTypeError, match="is not a whole number of at least 3"):
            options.at_least(3)(text)


@pytest.mark.parametrize(("seconds", "tries"), [(0.001, machine.REPEATS), (2.0, 3), (60.0, 1)])
def test_what_takes_long_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, seconds: float, tries: int) -> None:
    calls: list[None] = []
    ticks = count()
    # Asked before and after each try.
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(ticks) * seconds)
    assert machine._fastest(lambda: calls.append(None)) == pytest.approx(seconds)
    assert len(calls) == tries


def test_an_artifact_of_other_sources_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimum_neuron, "__file__", str(tmp_path / "__init__.py"))
    config, found = serving_config(2, 100, 16, "float32"), set[str]()
    assert config.sequence_length == 256
    for name in ("kernel.py", "kernel.cpp", "kernel.h"):
        (tmp_path / name).write_text("one")
        found |= {_fingerprint("model", config), _fingerprint("model", config), _fingerprint("another", config)}
    (tmp_path / "kernel.h").write_text("two")
    assert len(found | {_fingerprint("model", config)}) == 7


# Answers /health, and leaves the pid of a child that would outlive it.
FAKE_SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def fake(tmp_path: Path) -> RunningServer:
    command = [sys.executable, "-c", FAKE_SERVER, str(tmp_path / "child")]
    return RunningServer("fake", command, os.environ, tmp_path / "fake.log")


def test_a_server_is_ready_when_it_answers_and_leaves_no_process_behind(tmp_path: Path) -> None:
    with fake(tmp_path) as server:
        server.check()
        assert server.url.startswith("http://127.0.0.1:") and server.started_s > 0
        pid = int((tmp_path / "child").read_text(encoding="ascii"))
        os.kill(pid, 0)
    for _ in range(600):  # a killed process that none has waited for yet is a zombie
        stat = Path(f"/proc/{pid}/stat")
        if not stat.is_file() or stat.read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the child outlives its server")


def test_a_server_that_dies_and_a_step_that_fails_are_errors_with_their_reason(tmp_path: Path) -> None:
    with fake(tmp_path) as server:
        server._process.kill()
        server._process.wait()
        with pytest.raises(RuntimeError, match="server fake ended with exit code -9"):
            server.check()
    code = "print('ValueError: --dtype float16 is not there'); print('bye'); raise SystemExit(7)"
    reason = "server fake ended with exit code 7: ValueError: --dtype float16 is not there"
    with pytest.raises(RuntimeError, match=reason):
        RunningServer("fake", [sys.executable, "-c", code], os.environ, tmp_path / "fake.log").__enter__()
    code = "import sys; sys.stderr.write('no such package'); sys.exit(3)"
    with pytest.raises(RuntimeError, match=r"ended with 3: no such package"):
        newcomer.run_command((sys.executable, "-c", code), tmp_path, {})
