# SPDX-License-Identifier: Apache-2.0
"""`neuron serve --replicas 2` as processes on the loopback: a replica is killed under load, comes back, and the server ends."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psutil
import pytest
from helpers import python_process
from served_app import PATIENCE, free_port, metric


pytest.importorskip("ray")
# A tiny model's requests would be over before a replica is killed. The class is sent to Ray's processes whole.
START = """
import time
from optimum.commands.optimum_cli import main
from optimum_neuron.tools.serve.process import set_ray_environment
set_ray_environment()
from optimum_neuron.tools.serve.replicas import launch
class Slow(launch.Replica):
    def __init__(self, *arguments):
        from optimum_neuron.engine.engine import Engine
        step = Engine.step
        Engine.step = lambda engine: time.sleep(0.05) or step(engine)
        super().__init__(*arguments)
launch.Replica = Slow
main()
"""
BODY = {"model": "tiny", "prompt": "Hi", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
SLOTS, REPLICAS = 3, 2


class Server:
    """A running server. It ends with the fixture."""

    def __init__(self, artifact: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        words = ["neuron", "serve", artifact, "--backend", "engine", "--replicas", str(REPLICAS), "--port", str(port)]
        self.process = python_process(START, *words, "--served-model-name", "tiny", OMP_NUM_THREADS="1")

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def replicas(self) -> list[psutil.Process]:
        return [each for each in self.family() if "ray::ServeReplica" in " ".join(each.cmdline())]

    def health(self) -> dict[str, int] | None:
        """The number of replicas by state; None where the server is not healthy."""
        try:
            answer = httpx2.get(f"{self.url}/health", timeout=PATIENCE)
        except httpx2.TransportError:
            return None
        return answer.json()["replicas"] if answer.status_code == 200 else None

    def wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 3 * PATIENCE  # Ray starts ten processes, some of which import torch
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.05)

    def ask(self) -> str:
        """Return the text of an answer that is sent at once."""
        answer = httpx2.post(f"{self.url}/v1/completions", json=BODY, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text


class Stream:
    """A stream, read in a thread of its own: its text so far, and the code of the error that ended it."""

    def __init__(self, server: Server) -> None:
        self.text, self.error, self.is_done = "", None, False
        self._server = server

    def read(self) -> None:
        body = BODY | {"stream": True}
        with httpx2.stream("POST", f"{self._server.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.is_done = True
                elif line:
                    event = json.loads(line.removeprefix("data: "))
                    self.error = event["error"]["code"] if "error" in event else None
                    self.text += "" if self.error else event["choices"][0]["text"]


@pytest.fixture
def server(cpu_artifact: Callable[[str], Path]) -> Iterator[Server]:
    server = Server(cpu_artifact("llama"), free_port())
    try:
        server.wait(lambda: server.health() == {"running": REPLICAS})
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.communicate(timeout=PATIENCE)
        finally:
            server.process.kill()


@pytest.mark.slow
def test_no_request_without_a_token_is_lost_with_a_replica(server: Server) -> None:
    sockets = [each for process in server.family() for each in process.net_connections("tcp")]
    addresses = {each.laddr.ip.removeprefix("::ffff:") for each in sockets if each.status == "LISTEN"}
    assert addresses == {"127.0.0.1"}
    assert [process.environ()["RAY_USAGE_STATS_ENABLED"] for process in server.replicas()] == ["0"] * REPLICAS
    text = server.ask()
    early, late = ([Stream(server) for _ in range(count)] for count in (SLOTS + 1, SLOTS))
    with ThreadPoolExecutor(4 * SLOTS) as threads:
        reads = [threads.submit(stream.read) for stream in early]
        server.wait(lambda: all(stream.text for stream in early))
        # More than run at once: the others wait.
        whole = [threads.submit(server.ask) for _ in range(2 * SLOTS - 1)]
        reads += [threads.submit(stream.read) for stream in late]
        time.sleep(0.3)
        waiting = [stream for stream in late if not stream.text]
        killed = server.replicas()[0]
        killed.send_signal(signal.SIGKILL)
        assert [each.result() for each in whole] == [text] * len(whole)
        for read in reads:
            read.result()
    lost = [stream for stream in early + late if stream.error is not None]
    assert waiting and 1 <= len(lost) <= SLOTS
    assert all(stream.is_done for stream in early + late) and not set(waiting) & set(lost)
    assert {stream.error for stream in lost} == {"replica_lost"}
    assert all(stream.text and text.startswith(stream.text) for stream in lost)
    assert {stream.text for stream in early + late if stream not in lost} == {text}
    # Ray has started another one.
    server.wait(lambda: len(server.replicas()) == REPLICAS and server.health() == {"running": REPLICAS})
    assert killed.pid not in [process.pid for process in server.replicas()]
    assert server.ask() == text
    numbers = httpx2.get(f"{server.url}/metrics").text
    assert metric(numbers, "request_success_total", finished_reason="length") >= 1
    assert len(set(re.findall(r'replica="(\w+)"', numbers))) == REPLICAS
    _end(server, text)


def _end(server: Server, text: str) -> None:
    """A signal lets a stream end, refuses others, and leaves no process."""
    family, stream = server.family(), Stream(server)
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(stream.read)
        server.wait(lambda: bool(stream.text))
        server.process.send_signal(signal.SIGTERM)
        server.wait(lambda: server.health() is None)
        assert httpx2.post(f"{server.url}/v1/completions", json=BODY).json()["error"]["code"] == "draining"
        read.result()
    assert stream.text == text and stream.is_done and stream.error is None
    assert server.process.wait(PATIENCE) == 0
    psutil.wait_procs(family, timeout=PATIENCE)
    assert not [process for process in family if process.is_running()]
