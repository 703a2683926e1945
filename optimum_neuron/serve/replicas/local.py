# SPDX-License-Identifier: Apache-2.0
"""Servers as processes of this machine, which end with this one, however it ends."""

from __future__ import annotations

import os
import subprocess

from ...targets.neuron.sdk.devices import VISIBLE_CORES, replica_cores
from ...targets.processes import TiedProcess
from .launcher import ServerCommand, free_port, url_of


_LOOPBACK = "127.0.0.1"


class LocalServer:
    """A server's process.

    Args:
        host: where it listens.
        environment: variables that it gets beside this process's.
    """

    def __init__(self, command: ServerCommand, host: str, environment: dict[str, str]) -> None:
        port = free_port(host)
        self._url = url_of(host, port)
        self._process = TiedProcess(
            command.words(host, port),
            env={**os.environ, **command.environment, **environment},
            stdin=subprocess.DEVNULL,
        )

    def url(self) -> str:
        """Where it listens."""
        return self._url

    def wait(self) -> str:
        """Waits for its end, and tells why it ended."""
        return _ending(self._process.wait())

    def ended(self) -> str | None:
        """Why it has ended; None while it runs."""
        status = self._process.poll()
        return None if status is None else _ending(status)

    def stop(self) -> None:
        """Ends it and all that it started."""
        self._process.end()


def _ending(status: int) -> str:
    return f"its server ended by signal {-status}" if status < 0 else f"its server ended with exit status {status}"


class LocalLauncher:
    """Starts servers on this machine, each on Neuron cores of its own."""

    wanted = "this machine"

    def __init__(self, command: ServerCommand) -> None:
        self._command = command

    def start(self, replica: int) -> LocalServer:
        """Starts the server of a replica.

        Raises:
            RuntimeError: `NEURON_RT_VISIBLE_CORES` names fewer cores than the replicas take.
        """
        cores = replica_cores(replica, self._command.cores) if self._command.cores else None
        return LocalServer(self._command, _LOOPBACK, {} if cores is None else {VISIBLE_CORES: cores})

    def close(self) -> None:
        """Nothing is left."""
