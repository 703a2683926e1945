# SPDX-License-Identifier: Apache-2.0
"""The front's life: servers are started, requests are passed to them, and the last answer is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

import httpx2

from ..draining import DrainingServer, server_config
from .launcher import Launcher, url_of
from .replica import Replica
from .router import Router
from .supervisor import Supervisor


_CONNECT = 5.0  # seconds to a server that answered just now
_IDLE = 2.0  # seconds after which a connection is not used again: servers close theirs after 5


def serve_replicas(launcher: Launcher, count: int, name: str, bound: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT, then until the last request has its answer; ends all servers.

    Args:
        bound: has the address.

    Raises:
        StartError: no server came up.
    """
    try:
        asyncio.run(_serve(launcher, count, name, bound))
    finally:
        launcher.close()


async def _serve(launcher: Launcher, count: int, name: str, bound: socket.socket) -> None:
    replicas = [Replica(index) for index in range(count)]
    # Answers take as long as they take; a server that is gone is found by the supervisor.
    timeout = httpx2.Timeout(None, connect=_CONNECT)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE)
    # What is sent is the client's to choose: no encoding is accepted in its name.
    headers = {"accept-encoding": "identity"}
    async with httpx2.AsyncClient(timeout=timeout, limits=limits, headers=headers, trust_env=False) as client:
        router = Router(replicas, client)
        server = DrainingServer(server_config(router), router)
        kept = asyncio.create_task(Supervisor(launcher, replicas, client).run())
        served = asyncio.create_task(server.serve(sockets=[bound]))
        sys.stderr.write(f"serving {name} at {url_of(*bound.getsockname()[:2])}/v1 by {count} replicas\n")
        await asyncio.wait({kept, served}, return_when=asyncio.FIRST_COMPLETED)
        if kept.done():
            server.should_exit = server.force_exit = True
            await served
            return await kept
        kept.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await kept
        await served
