# SPDX-License-Identifier: Apache-2.0
"""Servers as actors of a Ray cluster, which chooses their machines."""

from __future__ import annotations

import os
from typing import Any

from .launcher import RunningServer, ServerCommand
from .local import LocalServer


_RESOURCE = "neuron_cores"  # as Ray counts a machine's logical Neuron cores, and hands them out
_ADDRESS = "RAY_ADDRESS"
# Else an actor that ends kills its own children, and no further ones: the guard of its server (guard.py), but not the server, which
# that guard would have ended.
_LEAVE_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "false"}
_LAST_ANSWER = 10.0  # seconds to end a server


class ServerActor:
    """The process on a Ray node that starts a server there, on that node's address."""

    def __init__(self, command: ServerCommand) -> None:
        import ray

        # Ray has set which Neuron cores are this actor's.
        self._server = LocalServer(command, ray.util.get_node_ip_address(), {})

    def url(self) -> str:
        """Where the server listens, or will."""
        return self._server.url()

    def wait(self) -> str:
        """Why it ended, once it has."""
        return self._server.wait()

    def stop(self) -> None:
        """Ends it and all that it started."""
        self._server.stop()


class RayServer:
    """An actor and what it was asked."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._asked, self._ending = actor.url.remote(), actor.wait.remote()
        self._url: str | None = None

    def url(self) -> str | None:
        """Where it listens; None while no node has room for it."""
        if self._url is None and self._is_answered(self._asked):
            self._url = self._ray.get(self._asked)
        return self._url

    def ended(self) -> str | None:
        """Why it has ended: by itself, or with its node."""
        if not self._is_answered(self._ending):
            return None
        try:
            reason: str = self._ray.get(self._ending)
        except self._ray.exceptions.RayError as error:
            return f"its node or actor died ({type(error).__name__})"
        return reason

    def stop(self) -> None:
        """Ends the server and its actor; on a node that is not reached both end when it finds that it is alone."""
        stopped = self._actor.stop.remote()
        self._ray.wait([stopped], timeout=_LAST_ANSWER if self._url is not None else 0)
        self._ray.kill(self._actor, no_restart=True)

    def _is_answered(self, asked: Any) -> bool:
        return bool(self._ray.wait([asked], timeout=0)[0])


class RayLauncher:
    """Starts servers on the nodes of the Ray cluster that `RAY_ADDRESS` names, or that this machine belongs to.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: there is no cluster.
    """

    def __init__(self, command: ServerCommand) -> None:
        try:
            import ray
        except ImportError as error:
            raise ImportError(
                "--data-parallel-backend ray needs Ray: pip install 'optimum-neuron-runtime[ray]'"
            ) from error
        self._ray, self._command = ray, command
        address = os.environ.get(_ADDRESS) or "auto"
        try:
            ray.init(address=address, log_to_driver=True, logging_level="ERROR")
        except (ConnectionError, RuntimeError) as error:
            raise RuntimeError(
                f"there is no Ray cluster at {_ADDRESS}={address} ({str(error).splitlines()[0][:120]}); start one with 'ray start "
                f"--head', and 'ray start --address=HEAD:6379' on each further machine"
            ) from error
        self._resources = {_RESOURCE: command.cores} if command.cores else {}
        self.wanted = (
            f"a Ray node with {command.cores} free {_RESOURCE}" if command.cores else "a Ray node with a free CPU"
        )

    def start(self, replica: int) -> RunningServer:
        """Asks Ray for a node and a server on it. A replica goes where the fewest are."""
        actor = self._ray.remote(ServerActor).options(
            name=f"optimum-neuron-replica-{replica}-{os.getpid()}-{os.urandom(4).hex()}",
            num_cpus=0 if self._command.cores else 1,
            resources=self._resources,
            max_restarts=0,  # the front starts another one, which may be elsewhere
            max_concurrency=2,  # one waits, and one stops
            runtime_env={"env_vars": _LEAVE_CHILDREN},
            scheduling_strategy="SPREAD",
        )
        return RayServer(self._ray, actor.remote(self._command))

    def close(self) -> None:
        """Leaves the cluster, with which all actors of this process end."""
        self._ray.shutdown()
