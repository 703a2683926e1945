# SPDX-License-Identifier: Apache-2.0
"""Where servers run, as the front sees it, and the command that each of them is. Imports nothing heavy."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """`optimum-cli neuron serve` for one replica; its address is chosen where it runs.

    Attributes:
        options: further ones of the command; those for vLLM go last.
        environment: variables that it gets beside those of its machine.
        cores: logical Neuron cores that it takes; 0 on a CPU.
    """

    artifact: Path
    backend: str
    name: str
    options: tuple[str, ...]
    vllm_options: tuple[str, ...]
    environment: Mapping[str, str]
    cores: int

    def words(self, host: str, port: int) -> list[str]:
        """The command line."""
        words = [sys.executable, "-m", "optimum.commands.optimum_cli", "neuron", "serve", str(self.artifact)]
        words += ["--backend", self.backend, "--served-model-name", self.name, "--host", host, "--port", str(port)]
        return [*words, *self.options, *(["--vllm-options", *self.vllm_options] if self.vllm_options else [])]


class RunningServer(Protocol):
    """A server that was started. Its methods may be called from any thread, one at a time, and do not wait long."""

    def url(self) -> str | None:
        """Where it listens, or will; None while there is no machine for it yet."""

    def ended(self) -> str | None:
        """Why it has ended; None while it runs."""

    def stop(self) -> None:
        """Ends it and all that it started; one that has ended is no error."""


class Launcher(Protocol):
    """Starts servers.

    Attributes:
        wanted: what a machine needs to run one, in words.
    """

    wanted: str

    def start(self, replica: int) -> RunningServer:
        """Starts the server of a replica, by its number from 0 on."""

    def close(self) -> None:
        """Called at the end, once all servers are stopped."""


def free_port(host: str) -> int:
    """A port that nobody listens at just now; a server that finds it taken ends, and is started anew at another one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as bound:
        bound.bind((host, 0))
        return int(bound.getsockname()[1])


def url_of(host: str, port: int) -> str:
    """The address of a server, as clients write it."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
