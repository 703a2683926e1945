# SPDX-License-Identifier: Apache-2.0
"""The address of a server, taken before a model is loaded for nothing. Imports nothing heavy."""

from __future__ import annotations

import socket


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the address, and that nobody can connect to before it listens. Port 0 takes a free one.

    Raises:
        OSError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _refusal(host, port, error) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _refusal(host, port, error) from error
    return bound


def _refusal(host: str, port: int, error: OSError) -> OSError:
    return OSError(f"{host}:{port} cannot be listened at ({error.strerror or error}); choose another --host or --port")
