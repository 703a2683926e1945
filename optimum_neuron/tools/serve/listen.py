# SPDX-License-Identifier: Apache-2.0
"""The address of a server, taken before a model is loaded for nothing. Imports nothing heavy."""

from __future__ import annotations

import socket


# Connections that may wait while a model loads: as many as uvicorn takes afterwards.
_BACKLOG = 2048


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address; port 0 takes a free one.

    It listens at once, so that no other process takes the port while the model loads: Linux lets two sockets with SO_REUSEADDR
    have one port until one of them listens. Who connects meanwhile waits for the server.

    Raises:
        OSError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _address_error(host, port, error) from error
    try:
        # Without it a server that starts again waits until the connections of the last one are forgotten.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise _address_error(host, port, error) from error
    return listening


def _address_error(host: str, port: int, error: OSError) -> OSError:
    return OSError(f"{host}:{port} cannot be listened at ({error.strerror or error}); choose another --host or --port")
