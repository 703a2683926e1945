# SPDX-License-Identifier: Apache-2.0
"""Parts that benchmarks share: the limits of a machine, artifacts that are used again, commands that fail, and servers."""

from __future__ import annotations

import os
import sys
import time
from itertools import count
from pathlib import Path

import pytest

import optimum_neuron
from benchmark import machine, newcomer
from benchmark.model import _fingerprint, serving_config
from benchmark.server import RunningServer


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


def test_a_step_that_fails_is_reported_with_the_end_of_what_it_printed(tmp_path: Path) -> None:
    code = "import sys; sys.stderr.write('no such package'); sys.exit(3)"
    with pytest.raises(RuntimeError, match=r"ended with 3: no such package"):
        newcomer.run_command((sys.executable, "-c", code), tmp_path, {})


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
    assert ends(pid)


def ends(pid: int) -> bool:
    """Return whether a killed process goes; a zombie that no process has waited for yet counts as gone."""
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
    reason = "server fake ended with exit code 7: ValueError: --dtype float16 is not there"
    with pytest.raises(RuntimeError, match=reason):
        RunningServer("fake", [sys.executable, "-c", code], os.environ, tmp_path / "fake.log").__enter__()


def test_a_server_that_dies_later_is_an_error_too(tmp_path: Path) -> None:
    with fake(tmp_path) as server:
        server._process.kill()
        server._process.wait()
        with pytest.raises(RuntimeError, match="server fake ended with exit code -9"):
            server.check()
