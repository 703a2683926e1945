# SPDX-License-Identifier: Apache-2.0
"""The servers that are compared: how each is started, when it is ready, how it ends. Measures nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from .load import SERVED_NAME


OURS, ALL_CHUNKS, VLLM_CPU = "optimum_neuron", "all_chunks", "vllm_cpu"
START_LIMIT_S = 600.0
STOP_LIMIT_S = 30.0


@dataclass(frozen=True)
class System:
    """A server's command line, without its port, and what it needs in its environment."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def our_system(artifact: Path) -> System:
    """This plugin with its defaults: a step holds one chunk of a prompt, and everything that decodes."""
    command = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(artifact), "--no-enable-prefix-caching")
    return System(OURS, command, {"VLLM_PLUGINS": "optimum_neuron"})


def all_chunks_system(artifact: Path, step_tokens: int) -> System:
    """The same, with room for whole prompts in a step: all their chunks run between two tokens of the others."""
    ours = our_system(artifact)
    return System(ALL_CHUNKS, (*ours.command, "--max-num-batched-tokens", str(step_tokens)), ours.environment)


def vllm_cpu_system(python: Path, checkpoint: str, dtype: str, slots: int, length: int) -> System:
    """vLLM's own CPU backend, with its own chunked prefill, its own kernels and torch.compile.

    Its console script does not find its version, and it is twice as fast with Intel's OpenMP as with GNU's.
    """
    python = python.absolute()  # not resolved: an environment's is a link to another one
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, "--dtype", dtype]
    command += ["--max-model-len", str(length), "--max-num-seqs", str(slots), "--no-enable-prefix-caching"]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "auto", "VLLM_CPU_KVCACHE_SPACE": "1"}
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.is_file():
        environment["LD_PRELOAD"] = str(openmp)
    return System(VLLM_CPU, tuple(command), environment)


class RunningServer:
    """A server in processes of its own, from the entry of the `with` statement to its exit.

    Args:
        log: where it writes what it says.
    """

    def __init__(self, system: System, log: Path) -> None:
        self.system = system
        self.url = ""
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RunningServer:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        arguments = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME]
        environment = os.environ | {"VLLM_NO_USAGE_STATS": "1"} | dict(self.system.environment)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.system.command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self._log.parent,
                start_new_session=True,  # its engine is another process, and ends with it
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def check(self) -> None:
        """Raises RuntimeError, with what the server said last, where it has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(f"the server {self.system.name} ended with exit code {code}: {last_error(self._log)}")

    def _wait_until_ready(self) -> None:
        limit = time.monotonic() + START_LIMIT_S
        while not self._answers():
            self.check()
            if time.monotonic() > limit:
                raise RuntimeError(
                    f"the server {self.system.name} was not ready after {START_LIMIT_S:.0f} s: {last_error(self._log)}"
                )
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                ready: bool = answer.status == 200
                return ready
        except OSError:
            return False

    def _stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_LIMIT_S)
        with suppress(ProcessLookupError):  # none of them is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def last_error(log: Path) -> str:
    """The line of a log that tells most about why a server ended: the last one that names an error."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line or "error: " in line]
    return (named or lines or ["it said nothing"])[-1]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
