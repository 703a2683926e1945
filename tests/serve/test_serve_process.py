# SPDX-License-Identifier: Apache-2.0
"""`optimum-cli neuron serve` as a process on the loopback: full, left by its clients, and ended."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import uvicorn
from helpers import python_process
from served_app import PATIENCE, metric

from optimum_neuron.serve.draining import DrainingServer
from optimum_neuron.serve.gate import Gate


# A tiny model's requests would be over before anybody could look.
START = """
import time
from optimum.commands.optimum_cli import main
from optimum_neuron.engine.engine import Engine
step = Engine.step
Engine.step = lambda engine: time.sleep(0.04) or step(engine)
main()
"""
SLOTS = 3


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    url: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def metric(self, name: str, **labels: str) -> float:
        return metric(httpx2.get(f"{self.url}/metrics").text, name, **labels)

    def wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.01)


@contextmanager
def serving(artifact: Path, *options: str, **variables: str) -> Iterator[Server]:
    """A server on a free port."""
    words = ["neuron", "serve", str(artifact), "--backend", "engine", "--port", "0", "--served-model-name", "tiny"]
    process = python_process(START, *words, *options, **variables)
    try:
        assert process.stderr is not None
        found = re.search(r"at (http://\S+)/v1: 3 requests of up to 64 tokens at once", process.stderr.readline())
        assert found, process.stderr.read()
        server = Server(process, found[1])
        server.wait(lambda: is_up(server))
        yield server
    finally:
        process.kill()
        process.communicate()


def is_up(server: Server) -> bool:
    try:
        return httpx2.get(f"{server.url}/health").status_code == 200
    except httpx2.ConnectError:
        return False


@pytest.fixture(scope="module")
def cpu(cpu_artifact: Callable[[str], Path]) -> Path:
    return cpu_artifact("llama")


def long(server: Server, **options: Any) -> Any:
    return server.client.completions.create(
        model="tiny", prompt="Hi", max_tokens=60, temperature=0, extra_body={"ignore_eos": True}, **options
    )


def test_a_process_refuses_notices_who_left_and_ends_when_all_have_their_answers(cpu: Path) -> None:
    with serving(cpu, "--max-queue", "1", OPTIMUM_NEURON_API_KEY="none") as server, ThreadPoolExecutor(8) as threads:
        assert httpx2.get(f"{server.url}/v1/models").status_code == 401
        # More than the queue takes.
        streams = [long(server, stream=True) for _ in range(SLOTS)]
        waiting = threads.submit(long, server)
        server.wait(lambda: server.metric("num_requests_waiting") == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            long(server)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        # Clients that go away make room for who waits.
        for stream in streams:
            next(stream)
            stream.close()
        server.wait(lambda: server.metric("request_success_total", finished_reason="abort") == SLOTS)
        whole = waiting.result().choices[0].text
        assert server.metric("num_requests_running") == 0
        # The end: one is answered, one is refused.
        stream = long(server, stream=True)
        pieces = [next(stream).choices[0].text]
        server.process.send_signal(signal.SIGTERM)
        server.wait(lambda: not is_up(server))
        with pytest.raises(openai.InternalServerError) as refused:
            long(server)
        assert refused.value.status_code == 503 and refused.value.code == "draining"
        assert "".join(pieces + [event.choices[0].text for event in stream]) == whole
        assert server.process.wait(PATIENCE) == 0
        assert "ending: 1 requests get their answers first" in server.process.stderr.read()  # type: ignore[union-attr]


def test_a_server_that_ends_listens_until_the_last_request_has_left() -> None:
    gate = Gate(slots=1, max_queue=0, is_stopped=lambda: False)
    server = DrainingServer(uvicorn.Config(lambda: None), gate)
    ticks = [asyncio.run(server.on_tick(1))]
    with gate.admit(1):
        server.handle_exit(signal.SIGTERM, None)
        ticks.append(asyncio.run(server.on_tick(2)))
    ticks.append(asyncio.run(server.on_tick(3)))
    assert ticks == [False, False, True]


def test_a_second_signal_ends_a_process_at_once(cpu: Path) -> None:
    with serving(cpu) as server:
        stream = long(server, stream=True)
        next(stream)
        server.process.send_signal(signal.SIGINT)
        server.wait(lambda: not is_up(server))
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE) == -signal.SIGINT
        with pytest.raises(openai.APIConnectionError):
            list(stream)
