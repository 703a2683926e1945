# SPDX-License-Identifier: Apache-2.0
"""What a server's process does before anything heavy is imported: take its address, set Ray's environment, or become vLLM."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence


# Connections that may wait while a model loads: as many as uvicorn takes afterwards.
_BACKLOG = 2048


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address; port 0 takes a free one. Raise OSError where it cannot be had.

    It listens at once, so that no other process takes the port while the model loads: Linux lets two sockets with SO_REUSEADDR
    have one port until one of them listens. Who connects meanwhile waits for the server.
    """
    listening = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        # Without it a server that starts again waits until the connections of the last one are forgotten.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        if listening is not None:
            listening.close()
        why = error.strerror or error
        raise OSError(f"{host}:{port} cannot be listened at ({why}); choose another --host or --port") from error
    return listening


def set_ray_environment() -> bool:
    """Return whether RAY_ADDRESS names a cluster. Else let the one that Ray starts be reached by this server's processes alone.

    Ray reads its environment while it is imported, and sends no usage statistics then. What the user has set stays.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # Ray would join any cluster of this machine when a call finds none
    if os.environ.get("RAY_ADDRESS"):
        return True
    # Ray's variable for systems on which a cluster is one machine: it then listens at the loopback, and not at all interfaces.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if not os.environ.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    return False


def has_vllm() -> bool:
    """Return whether vLLM is installed; a folder of that name is not vLLM."""
    found = importlib.util.find_spec("vllm")
    return found is not None and found.has_location


def become_vllm(options: Sequence[str], variables: Mapping[str, str | None]) -> None:
    """Replace this process by `vllm serve` with options, and with variables added to its environment where they have a value."""
    # The module of vLLM's console script, which need not be where this interpreter is.
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *options]
    sys.stdout.flush()
    sys.stderr.flush()
    given = {name: value for name, value in variables.items() if value is not None}
    os.execve(words[0], words, {**os.environ, **given})
