# SPDX-License-Identifier: Apache-2.0
"""The server's address, which no other process gets once it is taken."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from optimum_neuron.tools.serve.listen import open_socket


LOOPBACK, ANY = "127.0.0.1", "0.0.0.0"


def rival(reuse: tuple[int, ...]) -> socket.socket:
    made = socket.socket()
    for option in reuse:
        made.setsockopt(socket.SOL_SOCKET, option, 1)
    return made


@pytest.mark.parametrize(
    ("ours", "theirs", "reuse"),
    [
        (LOOPBACK, LOOPBACK, ()),
        (LOOPBACK, ANY, (socket.SO_REUSEADDR,)),
        (ANY, LOOPBACK, (socket.SO_REUSEADDR, socket.SO_REUSEPORT)),
        (ANY, ANY, (socket.SO_REUSEADDR, socket.SO_REUSEPORT)),
    ],
)
def test_no_other_socket_takes_the_port_while_a_model_loads(ours: str, theirs: str, reuse: tuple[int, ...]) -> None:
    with open_socket(ours, 0) as listening, closing(rival(reuse)) as other:
        with pytest.raises(OSError, match="Address already in use"):
            other.bind((theirs, listening.getsockname()[1]))
            other.listen()
        # Who connects reaches the server.
        with socket.create_connection((LOOPBACK, listening.getsockname()[1]), 5) as client:
            accepted, address = listening.accept()
            accepted.close()
            assert address == client.getsockname()


def test_who_has_the_port_without_listening_does_not_get_to_listen() -> None:
    with closing(rival((socket.SO_REUSEADDR,))) as other:
        other.bind((LOOPBACK, 0))
        with open_socket(*other.getsockname()), pytest.raises(OSError, match="Address already in use"):
            other.listen()


def test_a_port_at_which_somebody_listens_is_refused() -> None:
    with closing(rival((socket.SO_REUSEADDR, socket.SO_REUSEPORT))) as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"{LOOPBACK}:{port} cannot be listened at \(Address already in use\)"):
            open_socket(LOOPBACK, port)
