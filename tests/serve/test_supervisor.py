# SPDX-License-Identifier: Apache-2.0
"""Servers behind the front as real processes of a small script: started, killed, silent, replaced and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from served_app import PATIENCE

from optimum_neuron.serve.replicas.launcher import ServerCommand, free_port
from optimum_neuron.serve.replicas.local import LocalLauncher, LocalServer
from optimum_neuron.serve.replicas.replica import Replica
from optimum_neuron.serve.replicas.supervisor import Patience, StartError, Supervisor


# Its process id is its answer to every question, and it has a child, as a server's engine is one.
SCRIPT = """
import http.server, os, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{os.getpid()} {child.pid} {os.environ.get('NEURON_RT_VISIBLE_CORES')}".encode())
    def log_message(self, *_): pass
child = subprocess.Popen(["sleep", "1000"])
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""
QUICK = Patience(interval=0.02, answer=0.5, failures=2, first_restart=0.02, last_restart=0.1)


@dataclass(frozen=True, kw_only=True)
class ScriptCommand(ServerCommand):
    script: str

    def words(self, host: str, port: int) -> list[str]:
        return [sys.executable, "-S", "-E", "-c", self.script, host, str(port)]


COMMAND = ServerCommand(
    artifact=Path("/a b"),
    backend="engine",
    name="tiny",
    options=("--max-queue", "3"),
    vllm_options=(),
    environment={},
    cores=0,
)


def script(text: str = SCRIPT, **changes: Any) -> LocalLauncher:
    return LocalLauncher(ScriptCommand(**{**vars(COMMAND), **changes}, script=text))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass
class Kept:
    replicas: list[Replica]
    client: httpx2.AsyncClient

    async def wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    async def pids(self, index: int) -> tuple[int, int, str]:
        url = self.replicas[index].url
        own, child, cores = (await self.client.get(f"{url}/")).text.split()
        return int(own), int(child), cores


def kept(launcher: LocalLauncher, count: int, use: Callable[[Kept], Awaitable[None]]) -> None:
    """What happens while a supervisor runs."""

    async def main() -> None:
        replicas = [Replica(index) for index in range(count)]
        async with httpx2.AsyncClient(trust_env=False) as client:
            running = asyncio.create_task(Supervisor(launcher, replicas, client, QUICK).run())
            used = asyncio.create_task(use(Kept(replicas, client)))  # type: ignore[arg-type]
            await asyncio.wait({running, used}, return_when=asyncio.FIRST_COMPLETED)
            if used.done():
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                return await used
            used.cancel()
            await running

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_is_silent_is_replaced_and_the_others_stay(number: signal.Signals) -> None:
    seen: list[int] = []

    async def use(kept: Kept) -> None:
        await kept.wait(lambda: all(replica.url for replica in kept.replicas))
        gone, other = await kept.pids(0), await kept.pids(1)
        lost = asyncio.create_task(kept.replicas[0].lost.wait())
        await asyncio.sleep(0)
        os.kill(gone[0], number)
        await lost
        await kept.wait(lambda: kept.replicas[0].url is not None)
        new = await kept.pids(0)
        assert new[0] != gone[0] and not is_running(gone[0])
        assert await kept.pids(1) == other and [replica.restarts for replica in kept.replicas] == [1, 0]
        seen.extend([gone[1], *new[:2], *other[:2]])

    kept(script(), 2, use)
    assert len(seen) == 5
    while any(map(is_running, seen)):  # those that were killed take a moment
        time.sleep(0.01)


def test_where_no_server_comes_up_the_front_ends_and_says_so() -> None:
    async def use(kept: Kept) -> None:
        await asyncio.Event().wait()

    with pytest.raises(
        StartError, match="no replica came up: of replica 0 its server ended with exit status 3, and its output"
    ):
        kept(script("raise SystemExit(3)"), 1, use)


def test_each_server_of_a_machine_gets_neuron_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-7")

    async def use(kept: Kept) -> None:
        await kept.wait(lambda: all(replica.url for replica in kept.replicas))
        assert [(await kept.pids(index))[2] for index in (0, 1)] == ["4,5", "6,7"]

    kept(script(cores=2), 2, use)
    with pytest.raises(RuntimeError, match="NEURON_RT_VISIBLE_CORES=4-7 names 4"):
        script(cores=2).start(2)


def test_a_servers_command_is_the_one_that_a_user_would_type() -> None:
    words = COMMAND.words("::1", 7)
    assert words[1:5] == ["-m", "optimum.commands.optimum_cli", "neuron", "serve"]
    ours = [
        "/a b",
        "--backend",
        "engine",
        "--served-model-name",
        "tiny",
        "--host",
        "::1",
        "--port",
        "7",
        "--max-queue",
        "3",
    ]
    assert words[5:] == ours
    vllm = replace(COMMAND, backend="vllm", vllm_options=("--seed", "1"))
    assert vllm.words("h", 7)[-3:] == ["--vllm-options", "--seed", "1"]


def test_a_server_without_a_free_port_ends() -> None:
    port = free_port("127.0.0.1")

    class Taken(ScriptCommand):
        def words(self, host: str, _: int) -> list[str]:
            return super().words(host, port)

    command = Taken(**vars(COMMAND), script=SCRIPT.replace("child = ", "child = None #"))
    servers = [LocalServer(command, "127.0.0.1", {}) for _ in range(2)]
    try:
        while not (ended := [server.ended() for server in servers if server.ended()]):
            pass
        assert ended == ["its server ended with exit status 1"]
    finally:
        for server in servers:
            server.stop()
