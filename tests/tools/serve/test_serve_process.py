# SPDX-License-Identifier: Apache-2.0
"""`optimum-cli neuron serve` as a process on the loopback: full, left by its clients, and ended."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from helpers import Artifacts
from served_app import PATIENCE, ServerProcess
from warm_process import WarmProcess

from optimum_neuron.tools.serve.gate import Gate
from optimum_neuron.tools.serve.server import DrainingServer


# A tiny model's requests would be over before anybody could look.
START = """
import time
from optimum.commands.optimum_cli import main
from optimum_neuron.engine.engine import Engine
step = Engine.step
Engine.step = lambda engine: time.sleep(0.02) or step(engine)
main()
"""
SLOTS = 3
# How the image of deploy/Dockerfile asks for its server's health.
ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
HEALTH_CHECK = r"^  CMD (\[.*/health.*\])$"
# The same with little patience, and with sockets that keep little of what a client does not read.
IMPATIENT = f"""
import socket
from optimum_neuron.tools.serve import app, gate, process, server
gate.BODY_SECONDS = server.HEAD_SECONDS = server.WRITE_SECONDS = 1.0
app.HELD_BYTES, server.LAST_READS = 2**20, 2
taken = process.open_socket
def small(host, port):
    listening = taken(host, port)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listening
process.open_socket = small
{START.replace("0.02", "0.004")}"""


@contextmanager
def serving(artifact: Path, *options: str, script: str = START, **variables: str) -> Iterator[ServerProcess]:
    """A server on a free port."""
    words = ["neuron", "serve", str(artifact), "--backend", "engine", "--port", "0", "--served-model-name", "tiny"]
    process = WarmProcess(script, *words, *options, **variables)
    try:
        found = re.search(r"at (http://\S+)/v1: 3 requests of up to 64 tokens at once", process.stderr.readline())
        assert found, process.stderr.read()
        server = ServerProcess(process, found[1])
        server.wait(server.health)
        yield server
    finally:
        process.kill()
        process.communicate(PATIENCE)


def container_health(server: ServerProcess) -> int:
    """Return the exit code of the image's health check; 0 is healthy."""
    (line,) = re.findall(HEALTH_CHECK, DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    python, *words = (word.replace("http://127.0.0.1:8000", server.url) for word in json.loads(line))
    assert python == "python" and server.url in words[-1]
    return subprocess.run(
        [sys.executable, *words], stderr=subprocess.DEVNULL, timeout=PATIENCE, check=False
    ).returncode


def sockets(server: ServerProcess) -> int:
    """Return how many sockets the process has."""
    count = 0
    for each in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            count += "socket:" in os.readlink(each)
    return count


@pytest.fixture(scope="module")
def cpu(cpu_artifact: Artifacts) -> Path:
    return cpu_artifact("llama")


def test_a_process_notices_who_left_and_ends_when_all_have_their_answers(cpu: Path) -> None:
    with serving(cpu, "--max-queue", "0", OPTIMUM_NEURON_API_KEY="none") as server:
        assert httpx2.get(f"{server.url}/v1/models").status_code == 401
        assert container_health(server) == 0
        streams = [server.ask(stream=True) for _ in range(SLOTS)]
        with pytest.raises(openai.RateLimitError) as caught:
            server.ask()
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert (caught.value.type, caught.value.code) == ("rate_limit_error", "queue_full")
        assert "3 requests run or wait, and the server takes in 3 at once" in str(caught.value)
        assert server.metric("request_refused_total", status="429") == 1
        for stream in streams:
            next(stream)
            stream.close()
        server.wait(lambda: server.metric("request_success_total", finished_reason="abort") == SLOTS)
        example = [sys.executable, ROOT / "examples" / "ask_server.py", server.url]
        done = subprocess.run(example, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.stdout and not done.returncode, done.stderr
        whole = server.ask().choices[0].text
        # The end: one is answered, one is refused.
        stream = server.ask(stream=True)
        pieces = [next(stream).choices[0].text]
        server.process.send_signal(signal.SIGTERM)
        server.wait(lambda: not server.health())
        assert container_health(server) == 1
        with pytest.raises(openai.InternalServerError) as refused:
            server.ask()
        assert refused.value.status_code == 503 and refused.value.code == "draining"
        assert "".join(pieces + [event.choices[0].text for event in stream]) == whole
        assert server.process.wait(PATIENCE) == 0
        assert "ending: 1 requests get their answers first" in server.process.stderr.read()


class Client:
    """A client by hand, which sends what it wants and reads when it wants."""

    def __init__(self, server: ServerProcess) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(PATIENCE)
        self._socket.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))

    def send(self, data: bytes) -> Client:
        self._socket.sendall(data)
        return self

    def head(self, *headers: str) -> Client:
        lines = ["POST /v1/completions HTTP/1.1", "Host: x", *headers, "", ""]
        return self.send("\r\n".join(lines).encode())

    def ask(self, **options: Any) -> Client:
        body = json.dumps({"model": "tiny", "prompt": "Hi", "temperature": 0, "ignore_eos": True} | options).encode()
        return self.head(f"Content-Length: {len(body)}").send(body)

    def answer(self, mark: bytes = b"}}") -> bytes:
        """Reads up to a mark, or to the end of the connection."""
        read = b""
        try:
            while mark not in read and (part := self._socket.recv(65536)):
                read += part
        except ConnectionResetError:
            pass
        return read

    def drip(self) -> bytes:
        """Sends a byte from time to time until the server answers or closes the connection."""
        self._socket.settimeout(0.1)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                self.send(b"x")
                return self._socket.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                return b""
        raise AssertionError("the server waits for ever")


def test_no_client_makes_the_server_wait_for_ever(cpu: Path) -> None:
    with serving(cpu, script=IMPATIENT) as server, ThreadPoolExecutor(8) as threads:
        at_first = sockets(server)
        silent = Client(server)
        slow = [Client(server).send(b"POST /v1/completions HTT"), Client(server).head("Content-Length: 5000")]
        dripping = [threads.submit(client.drip) for client in slow]
        deaf = Client(server).ask(n=11, max_tokens=60, stream=True)
        huge = Client(server).head("Content-Length: 90000000")
        assert huge.answer().startswith(b"HTTP/1.1 413 ")
        # Bodies of which each has room alone: all of them together have not.
        large = [Client(server).head("Content-Length: 300000").send(b" " * 299_999) for _ in range(4)]
        refused = threads.submit(large[-1].answer).result()
        assert b"503 Service Unavailable" in refused and b"retry-after: " in refused
        assert b"200 OK" in Client(server).ask(max_tokens=1).answer()
        assert threads.submit(silent.answer).result() == b"" and dripping[0].result() == b""
        assert dripping[1].result().startswith(b"HTTP/1.1 408 ")
        # Who reads nothing has its answer cut off, and its places are free before.
        server.wait(lambda: server.metric("num_requests_waiting") + server.metric("num_requests_running") == 0)
        server.wait(lambda: sockets(server) <= at_first)
        assert b"[DONE]" not in deaf.answer(b"[DONE]")
        told = {client.answer().split()[1] for client in large[:-1]}
        assert b"408" in told and told <= {b"408", b"503"}


def test_a_server_ends_whatever_its_clients_do(cpu: Path) -> None:
    with serving(cpu, script=IMPATIENT.replace("= 1.0", "= 600.0")) as server:
        there = Client(server).ask(max_tokens=60, stream=True)
        assert b"data: " in there.answer(b"data: ")
        idle, head = Client(server), Client(server).send(b"POST /v1/completions HTT")
        body, deaf = Client(server).head("Content-Length: 5000"), Client(server).ask(n=8, max_tokens=60, stream=True)
        server.wait(lambda: server.metric("num_requests_running") == SLOTS)
        server.process.send_signal(signal.SIGTERM)
        assert b"data: [DONE]" in there.answer(b"[DONE]")
        assert server.process.wait(PATIENCE) == 0
        assert not idle.answer() and not head.answer() and b" 200 " not in body.answer()
        assert b"[DONE]" not in deaf.answer(b"[DONE]")
        assert "Traceback" not in server.process.stderr.read()


def test_who_has_no_answer_when_the_time_of_a_servers_end_is_over_is_told(cpu: Path) -> None:
    with serving(cpu, "--drain-timeout", "0.2") as server:
        stream = server.ask(stream=True)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server ended before the answer did"):
            list(stream)
        assert server.process.wait(PATIENCE) == 0
        assert "1 requests got no answer within 0.2 s" in server.process.stderr.read()


def test_a_second_signal_ends_a_server_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, raised = Gate(slots=1, max_queue=0, stopped=lambda: None), []
    server = DrainingServer(lambda: None, gate, 60, gate.check_open)  # type: ignore[arg-type]
    for name in ("signal", "raise_signal"):
        monkeypatch.setattr(signal, name, lambda *given: raised.append(given))
    server.handle_exit(signal.SIGTERM, None)
    assert not raised
    server.handle_exit(signal.SIGINT, None)
    assert raised == [(signal.SIGINT, signal.SIG_DFL), (signal.SIGINT,)]
