# SPDX-License-Identifier: Apache-2.0
"""`neuron serve --replicas 2` as processes on the loopback: a replica is killed under load, comes back, and the server ends."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import psutil
import pytest
from helpers import Artifacts, python_process
from served_app import PATIENCE, ServerProcess, free_port


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
SLOTS, REPLICAS = 3, 2


class Server(ServerProcess):
    """A running server of replicas."""

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def replicas(self) -> list[psutil.Process]:
        return [each for each in self.family() if "ray::ServeReplica" in " ".join(each.cmdline())]

    def is_whole(self) -> bool:
        answer = self.health()
        return answer is not None and answer.json()["replicas"] == {"running": REPLICAS}

    def answer(self) -> str:
        """Return the text of an answer that is sent at once."""
        text: str = self.ask().choices[0].text
        return text


class Stream:
    """A stream, read in a thread of its own: its text so far, and the code of the error that ended it."""

    def __init__(self, server: Server) -> None:
        self.text, self.error = "", None
        self._server = server

    def read(self) -> None:
        try:
            for event in self._server.ask(stream=True):
                self.text += event.choices[0].text
        except openai.APIError as error:
            self.error = error.code


@pytest.fixture
def server(cpu_artifact: Artifacts) -> Iterator[Server]:
    port = str(free_port())
    words = [
        "neuron",
        "serve",
        cpu_artifact("llama"),
        "--backend",
        "engine",
        "--replicas",
        str(REPLICAS),
        "--port",
        port,
    ]
    process = python_process(START, *words, "--served-model-name", "tiny", OMP_NUM_THREADS="1")
    server = Server(process, f"http://127.0.0.1:{port}")
    try:
        server.wait(server.is_whole, 3 * PATIENCE)  # Ray starts ten processes, some of which import torch
        yield server
    finally:
        process.terminate()
        try:
            process.communicate(timeout=PATIENCE)
        finally:
            process.kill()


@pytest.mark.slow
def test_no_request_without_a_token_is_lost_with_a_replica(server: Server) -> None:
    sockets = [each for process in server.family() for each in process.net_connections("tcp")]
    addresses = {each.laddr.ip.removeprefix("::ffff:") for each in sockets if each.status == "LISTEN"}
    assert addresses == {"127.0.0.1"}
    assert [process.environ()["RAY_USAGE_STATS_ENABLED"] for process in server.replicas()] == ["0"] * REPLICAS
    text = server.answer()
    early, late = ([Stream(server) for _ in range(count)] for count in (SLOTS + 1, SLOTS))
    with ThreadPoolExecutor(4 * SLOTS) as threads:
        reads = [threads.submit(stream.read) for stream in early]
        server.wait(lambda: all(stream.text for stream in early))
        # More than run at once: the others wait.
        whole = [threads.submit(server.answer) for _ in range(2 * SLOTS - 1)]
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
    assert not set(waiting) & set(lost)
    assert {stream.error for stream in lost} == {"replica_lost"}
    assert all(stream.text and text.startswith(stream.text) for stream in lost)
    assert {stream.text for stream in early + late if stream not in lost} == {text}
    # Ray has started another one.
    server.wait(lambda: len(server.replicas()) == REPLICAS and server.is_whole(), 3 * PATIENCE)
    assert killed.pid not in [process.pid for process in server.replicas()]
    assert server.answer() == text
    assert server.metric("request_success_total", finished_reason="length") >= 1
    assert len(set(re.findall(r'replica="(\w+)"', httpx2.get(f"{server.url}/metrics").text))) == REPLICAS
    # A signal lets a stream end, refuses others, and leaves no process.
    family, stream = server.family(), Stream(server)
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(stream.read)
        server.wait(lambda: bool(stream.text))
        server.process.send_signal(signal.SIGTERM)
        server.wait(lambda: not server.health())
        with pytest.raises(openai.InternalServerError) as refused:
            server.ask()
        read.result()
    assert refused.value.code == "draining" and (stream.text, stream.error) == (text, None)
    assert server.process.wait(PATIENCE) == 0
    psutil.wait_procs(family, timeout=PATIENCE)
    assert not [process for process in family if process.is_running()]
