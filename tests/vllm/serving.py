# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` in processes of its own: started on a free port of the loopback, watched, and ended with all its children."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import requests
from openai import AsyncOpenAI, OpenAI
from otlp_collector import Collector


# How long anything may take before a test fails instead of hanging; a busy machine is ten times slower than an idle one.
PATIENCE = 240


@dataclass
class Server:
    """A running `vllm serve`.

    Attributes:
        model: what it was told to serve, and what requests name.
        log: the file with its output and its engines'.
    """

    process: subprocess.Popen[bytes]
    port: int
    model: str
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    @property
    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[psutil.Process]:
        """The server's process and all below it."""
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def engines(self) -> list[psutil.Process]:
        """The processes that run engines, by the title that vLLM gives them."""
        return [process for process in self.processes() if "EngineCore" in " ".join(process.cmdline())]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's values over all engines, or of those with the given labels."""
        text = requests.get(f"{self.url}/metrics", timeout=PATIENCE).text
        found = re.findall(rf"^vllm:{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name}"
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for shown, value in found if all(label in shown for label in wanted))

    def wait_idle(self) -> None:
        wait_for(lambda: self.metric("num_requests_running") + self.metric("num_requests_waiting") == 0)


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds; fails after `PATIENCE` seconds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE} s in vain"
        time.sleep(0.05)


def server_command(model: str | Path, *options: str) -> list[str]:
    """The command that a user types: vLLM's console script stands beside the interpreter."""
    return [str(Path(sys.executable).with_name("vllm")), "serve", str(model), *options]


def cli_command(model: str | Path, *options: str) -> list[str]:
    """The same through this package's command, which becomes vLLM's server."""
    words = [sys.executable, "-m", "optimum.commands.optimum_cli", "neuron", "serve", str(model)]
    return [*words, "--backend", "vllm", "--vllm-options", *options]


def server_environment(**variables: str) -> dict[str, str]:
    """This process's environment without what tests change in it for engines of their own process."""
    ours = ("VLLM_ENABLE_V1_MULTIPROCESSING", "OPTIMUM_NEURON_VLLM_ARTIFACT")
    return {name: value for name, value in os.environ.items() if name not in ours} | variables


def run_until_it_ends(folder: Path, model: str | Path, *options: str, **variables: str) -> tuple[int, str]:
    """A `vllm serve` that cannot start: its exit code and output."""
    done = subprocess.run(
        server_command(model, "--port", str(free_port()), *options),
        cwd=folder,
        env=server_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stdout


@contextmanager
def serving(
    folder: Path,
    model: str | Path,
    *options: str,
    command_of: Callable[..., list[str]] = server_command,
    **variables: str,
) -> Iterator[Server]:
    """A server that is ready, whose working directory and log are in `folder`; nothing of it is left afterwards."""
    port, log = free_port(), folder / "server.log"
    command = command_of(model, "--host", "127.0.0.1", "--port", str(port), *options)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=server_environment(**variables), stdout=output, stderr=subprocess.STDOUT
        )
    server = Server(process, port, str(model), log)
    try:
        wait_for(lambda: process.poll() is not None or is_healthy(server))
        assert process.poll() is None, f"the server ended at start:\n{server.output()[-4000:]}"
        yield server
    finally:
        stop(server)


def is_healthy(server: Server) -> bool:
    try:
        return requests.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
    except requests.ConnectionError:
        return False


def stop(server: Server) -> int:
    """Asks the server to end as a service manager does; returns its exit code. Kills what is left of it after a while."""
    family = server.processes()
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    try:
        return server.process.wait(PATIENCE)
    finally:
        for process in psutil.wait_procs(family, timeout=10)[1]:
            process.kill()
        server.process.wait()


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


class SharedServer:
    """A server of the tiny artifact with tool calls, started again for whoever comes after a test that ended it."""

    def __init__(self, artifact: Path, folders: Callable[[str], Path]) -> None:
        self._artifact = artifact
        self._folders = folders
        self._running = ExitStack()
        self._server: Server | None = None
        self.collector = Collector()

    def get(self) -> Server:
        if self._server is None or self._server.process.poll() is not None:
            self.close()
            options = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details"]
            # A random model would fill a JSON text with spaces.
            options += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
            options += ["--otlp-traces-endpoint", self.collector.endpoint]
            traces = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "100"}
            server = serving(self._folders("server"), self._artifact, *options, command_of=cli_command, **traces)
            self._server = self._running.enter_context(server)
        return self._server

    def close(self) -> None:
        self._running.close()
