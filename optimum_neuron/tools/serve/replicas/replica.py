# SPDX-License-Identifier: Apache-2.0
"""One replica: the server's application over its own copy of the model, in a process of Ray, called by the front."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import ray
from ray import serve
from starlette.types import Message, Scope

from ....artifact.artifact import MANIFEST_NAME
from ..server import ServerOptions, load_app


_LOOPBACK = "127.0.0.1"
logger = logging.getLogger(__name__)


class ReplicaClosedError(Exception):
    """The replica's engine has stopped: another replica has to answer."""


def manifest_digest(artifact: Path) -> str:
    """Return the digest of an artifact: its manifest has digests of all its files."""
    return hashlib.sha256((artifact / MANIFEST_NAME).read_bytes()).hexdigest()


class Replica:
    """A loaded model that answers the front's calls. Ray Serve makes it, asks for its health and ends it. Raises ValueError where
    this machine has another artifact at the path than that of the digest."""

    def __init__(self, options: ServerOptions, digest: str) -> None:
        # Ray 2.60 binds its channel to all interfaces, and has no option for it.
        if ray.util.get_node_ip_address() == _LOOPBACK:
            from ray.serve._private import replica

            bind = replica.add_port_to_grpc_server
            replica.add_port_to_grpc_server = lambda server, _: bind(server, f"{_LOOPBACK}:0")
        self._life = ExitStack()
        found = manifest_digest(options.artifact)
        if found != digest:
            raise ValueError(
                f"{options.artifact} on {ray.util.get_node_ip_address()} has the manifest {found[:12]}, and the other replicas load "
                f"{digest[:12]}; copy the same artifact to each machine"
            )
        self._name = serve.get_replica_context().replica_id.unique_id
        self._loaded = self._life.enter_context(load_app(options))

    def __del__(self) -> None:
        self._life.close()

    async def check_health(self) -> None:
        """Raise ApiError where the engine has stopped; Ray then replaces this replica."""
        self._loaded.gate.check_open()

    async def read_metrics(self) -> tuple[str, str]:
        return self._name, self._loaded.metrics.to_text().decode()

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[list[Message]]:
        """Yield the messages of the response, as many at once as there are. The first list brings the first token.

        An iteration that ends before the response does aborts the request. ReplicaClosedError: the engine has stopped.
        """
        incoming, outgoing = asyncio.Queue[Message](), asyncio.Queue[Message | None]()
        incoming.put_nowait({"type": "http.request", "body": body})
        task = asyncio.ensure_future(self._loaded.app(scope, incoming.get, outgoing.put))
        task.add_done_callback(lambda _: outgoing.put_nowait(None))
        try:
            while (message := await outgoing.get()) is not None:
                if message.get("status") == 503 and self._loaded.served.service.stopped is not None:
                    raise ReplicaClosedError
                messages = [message]
                # The application sends its first events without a pause between them.
                while not outgoing.empty() and (message := outgoing.get_nowait()) is not None:
                    messages.append(message)
                yield messages
                if message is None:
                    break
            if (error := task.exception()) is not None:  # the client has an answer that says so
                logger.error("the replica failed", exc_info=error)
        finally:
            task.cancel()
