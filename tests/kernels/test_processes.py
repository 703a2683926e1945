# SPDX-License-Identifier: Apache-2.0
"""Processes that compile or run graphs end with the one that started them, however it ends, and with all they started."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import forbidden, python_process

from optimum_neuron.kernels.host.processes import Processes, TiedProcess, run_jobs


# A compiler that started another: both write down who they are, and neither ends by itself.
COMPILER = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
pids = pathlib.Path(sys.argv[1])
pids.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
pids.with_suffix(".new").rename(pids)
time.sleep(600)
"""
# How the parent ends, when its compiler runs.
STARTER = """
import os, sys, time, threading
from optimum_neuron.kernels.host.processes import TiedProcess

def start():
    process = TiedProcess([sys.executable, "-S", "-c", sys.argv[1], sys.argv[2]])
    print("started", flush=True)
    threading.Event().wait()

{how}
"""
STARTS = {
    "the main thread": "start()",
    "another thread": "threading.Thread(target=start).start()",
    "a process with a fork": "if os.fork() == 0: time.sleep(5); os._exit(0)\nstart()",
    "a process that forks afterwards": (
        "threading.Thread(target=start, daemon=True).start()\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.01)\n"
        "if os.fork() == 0: time.sleep(5); os._exit(0)\ntime.sleep(600)"
    ),
}


def is_running(pid: int) -> bool:
    """A zombie whose new parent has not looked yet is no process any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_pids(path: Path) -> list[int]:
    wait_for(path.is_file)
    return [int(pid) for pid in path.read_text().split()]


@pytest.mark.parametrize(
    ("start", "number"), [*((start, signal.SIGKILL) for start in STARTS), ("another thread", signal.SIGTERM)]
)
def test_a_killed_parent_leaves_nothing_running(tmp_path: Path, start: str, number: signal.Signals) -> None:
    pids = tmp_path / "pids"
    parent = python_process(STARTER.format(how=STARTS[start]), COMPILER, pids)
    try:
        running = read_pids(pids)
        assert all(map(is_running, running))
    finally:
        parent.send_signal(number)
    parent.wait()
    wait_for(lambda: not any(map(is_running, running)))
    assert parent.stdout is not None and parent.stderr is not None
    parent.stdout.close()
    parent.stderr.close()


def test_what_a_command_leaves_running_ends_with_it_and_is_not_signalled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another's by then."""
    pids = tmp_path / "pids"
    process = TiedProcess(["sh", "-c", f"sleep 600 & echo $! > {pids}"])
    assert process.wait() == 0
    wait_for(lambda: not any(map(is_running, read_pids(pids))))

    monkeypatch.setattr(os, "kill", forbidden)
    monkeypatch.setattr(os, "killpg", forbidden)
    process.end()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/dev/fd"))

    gc.collect()  # what earlier tests left
    before = descriptors()
    TiedProcess(["true"]).end()
    with pytest.raises(FileNotFoundError):
        TiedProcess(["true"], cwd=tmp_path / "gone")
    gc.collect()
    assert descriptors() == before


def test_the_status_is_the_commands() -> None:
    for script, status in (("exit 0", 0), ("exit 3", 3), *((f"kill -{number} $$", -number) for number in (9, 15, 11))):
        process = TiedProcess(["sh", "-c", script])
        assert process.wait() == status
        process.end()
    process = TiedProcess(["no-such-compiler"], stderr=subprocess.PIPE, text=True)
    assert "no-such-compiler cannot be started: No such file" in process.communicate()[1]
    assert process.returncode == 127


def test_streams_environment_folder_and_descriptors_reach_the_command(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    script = f'read line; echo "$line $NAME $(pwd)"; echo passed > /dev/fd/{writing}'
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "NAME": "value"}
    process = TiedProcess(["sh", "-c", script], **streams, cwd=tmp_path, env=environment, pass_fds=(writing,))
    os.close(writing)
    assert process.communicate("line\n")[0] == f"line value {tmp_path}\n"
    assert os.read(reading, 10) == b"passed\n"
    os.close(reading)
    process.end()


def test_an_orphan_has_its_grace_to_end_in_order(tmp_path: Path) -> None:
    """What notices by itself that its parent has gone may finish; what does not is killed then."""
    script = (
        "import os, sys, time\nfrom optimum_neuron.kernels.host.processes import TiedProcess\n"
        "orderly = TiedProcess(['sh', '-c', 'cat; sleep 0.2; echo > $0', sys.argv[1]], stdin=-1, grace=30)\n"
        "silent = TiedProcess(['sh', '-c', 'echo $$ > $0; exec sleep 600', sys.argv[2]], grace=1)\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    parent = python_process(script, tmp_path / "done", tmp_path / "pid")
    parent.communicate()
    wait_for(lambda: (tmp_path / "done").is_file())
    wait_for(lambda: not is_running(int((tmp_path / "pid").read_text())))


def test_a_failed_job_ends_the_others_and_those_that_wait_never_start(tmp_path: Path) -> None:
    processes, hanging = Processes(), threading.Event()

    def hang(number: int) -> None:
        with processes.start([sys.executable, "-S", "-c", COMPILER, str(tmp_path / f"{number}")]) as process:
            hanging.set()
            process.wait()

    def fail() -> None:
        hanging.wait()
        read_pids(tmp_path / "0")
        raise ValueError("the first error")

    with pytest.raises(ValueError, match="the first error"):
        run_jobs([partial(hang, 0), fail, partial(hang, 1), partial(hang, 2)], 2, processes.end)
    wait_for(lambda: not any(map(is_running, read_pids(tmp_path / "0"))))
    with pytest.raises(RuntimeError, match="compiling was stopped"), processes.start(["true"]):
        pass
    assert not (tmp_path / "2").exists()
