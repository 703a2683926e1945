# SPDX-License-Identifier: Apache-2.0
"""Messages between a rank and its parent: whole, or told from what is none."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from optimum_neuron.targets.neuron.rank.wire import Channel, WireError


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    one, other = socket.socketpair()
    yield one, Channel(other)
    one.close()
    other.close()


def head(mark: bytes, length: int, size: int) -> bytes:
    return struct.pack("<4sIQ", mark, length, size)


def test_messages_arrive_whole_and_in_order(ends: tuple[socket.socket, Channel]) -> None:
    sender, data = Channel(ends[0]), bytes(range(256)) * 8192  # more than a socket holds

    def send() -> None:
        sender.send({"write": "key"}, data)
        sender.send({"run": "graph"})

    thread = threading.Thread(target=send)
    thread.start()
    assert ends[1].receive(60.0) == ({"write": "key"}, data)
    assert ends[1].receive(60.0, most=0) == ({"run": "graph"}, b"")
    thread.join()


@pytest.mark.parametrize(
    "sent",
    [
        head(b"WARN", 2, 0) + b"{}",
        head(b"RANK", 1 << 30, 0),
        head(b"RANK", 2, 9) + b"{}",
        head(b"RANK", 2, 0) + b"[]",
        head(b"RANK", 2, 0) + b"{\xff",
    ],
)
def test_what_is_no_message_is_told(sent: bytes, ends: tuple[socket.socket, Channel]) -> None:
    ends[0].sendall(sent)
    with pytest.raises(WireError):
        ends[1].receive(60.0, most=8)


@pytest.mark.parametrize(("closed", "error"), [(False, TimeoutError), (True, EOFError)])
@pytest.mark.parametrize("sent", [b"", b"RA", head(b"RANK", 2, 3) + b"{}a"])
def test_a_message_that_does_not_come_to_its_end_is_a_timeout_or_the_end(
    sent: bytes, closed: bool, error: type[Exception], ends: tuple[socket.socket, Channel]
) -> None:
    ends[0].sendall(sent)
    if closed:
        ends[0].close()
    with pytest.raises(error):
        ends[1].receive(60.0 if closed else 0.05)
