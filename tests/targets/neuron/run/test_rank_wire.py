# SPDX-License-Identifier: Apache-2.0
"""Between ranks and their parent: messages are whole, or told from what is none, and a step ends with the last rank."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from optimum_neuron.targets.neuron.rank.steps import FAILED, PLACES, RAN, WAITED, ParentSteps, RankSteps, board_bytes
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


def test_a_step_ends_with_the_last_rank_and_a_quick_one_runs_the_next_step_meanwhile() -> None:
    memory, pairs = memoryview(bytearray(board_bytes(2))), [socket.socketpair() for _ in range(2)]
    steps = ParentSteps(memory)
    quick, slow = (RankSteps(memory, steps.events, rank, end.fileno()) for rank, (end, _) in enumerate(pairs))
    for _, end in pairs:
        steps.poll.register(end, 0)
    for first in (0, 2):
        for number in (first, first + 1):
            steps.start(number, {"run": number}, 2)
            assert quick.wait_for_step() == {"run": number}
            pairs[0][0].sendall(b"failed" * (number - first))
            quick.end_step(failed=number > first)
        pairs[0][1].sendall(b"command")
        assert quick.wait_for_step() is None  # nor a step again that the slow one runs
        assert steps.wait(0.0) == (False, []) and list(steps.ends[first % PLACES]) == [RAN, WAITED]
        for number, end in ((first, RAN), (first + 1, FAILED)):
            assert slow.wait_for_step() == {"run": number}
            slow.end_step(failed=False)
            assert steps.wait(60.0) == (True, [steps.done]) and list(steps.ends[number % PLACES]) == [end, RAN]
    pairs[1][0].close()
    assert steps.wait(60.0) == (False, [pairs[1][1].fileno()])
    for file in (*steps.events, *(end.detach() for end in (pairs[1][1], *pairs[0]))):
        os.close(file)
