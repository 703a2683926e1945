# SPDX-License-Identifier: Apache-2.0
"""Has a graph run where XLA is: a process that plays the devices of all ranks, collectives included (fakes/devices.py).

A device is outside of the process that uses it, too, so a rank needs no more than numpy.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

import numpy as np


ADDRESS_VARIABLE = "FAKE_NEURON_DEVICES"  # the path of a socket
_connections: list[socket.socket] = []


def run(rank: int, hlo: bytes, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of a rank's part of a graph, as bytes."""
    if not _connections:
        _connections.append(socket.socket(socket.AF_UNIX))
        _connections[0].connect(os.environ[ADDRESS_VARIABLE])
    send(_connections[0], [struct.pack("<I", rank), hlo, *(each.tobytes() for each in arguments)])
    return [np.frombuffer(each, np.uint8) for each in receive(_connections[0])]


def send(connection: socket.socket, parts: Sequence[bytes]) -> None:
    connection.sendall(struct.pack("<I", len(parts)))
    for part in parts:
        connection.sendall(struct.pack("<Q", len(part)) + part)


def receive(connection: socket.socket) -> list[bytearray]:
    """What the other side sent; EOFError where it has closed."""
    (count,) = struct.unpack("<I", _read(connection, 4))
    return [_read(connection, struct.unpack("<Q", _read(connection, 8))[0]) for _ in range(count)]


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
