# SPDX-License-Identifier: Apache-2.0
"""Messages between a rank and its parent: whole, or told from what is none; and the plan that one of them holds."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from optimum_neuron.targets.neuron.rank.plan import RankGraph, RankPlan, RankTensor, RankWeight
from optimum_neuron.targets.neuron.rank.wire import Channel, RankError, WireError
from optimum_neuron.targets.neuron.rank.worker import load_plan


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


UNFINISHED = [b"", b"RA", head(b"RANK", 2, 3) + b"{}a"]


@pytest.mark.parametrize(("closed", "error"), [(False, TimeoutError), (True, EOFError)])
@pytest.mark.parametrize("sent", UNFINISHED)
def test_a_message_that_does_not_come_to_its_end_is_a_timeout_or_the_end(
    sent: bytes, closed: bool, error: type[Exception], ends: tuple[socket.socket, Channel]
) -> None:
    ends[0].sendall(sent)
    if closed:
        ends[0].close()
    with pytest.raises(error):
        ends[1].receive(60.0 if closed else 0.05)


def test_a_plan_is_read_as_it_was_sent(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"head" + np.arange(6, dtype=np.float32).tobytes())
    inputs = (RankTensor("tokens", "input", (2, 4), "int32", 0), RankTensor("key", "state", (2, 4), "bfloat16"))
    outputs = (
        RankTensor("logits", "output", (2, 8), "float32", 64),
        RankTensor("k", "output", (2, 4), "bfloat16", None, "key"),
    )
    weight = RankWeight(("model.head", "model.tied"), str(tmp_path / "weights"), 4, (2, 3), "float32")
    plan = RankPlan("nrtpy", (0,), 1, 128, ((weight,),), {"step": RankGraph("step.neff", inputs, outputs)})
    read = RankPlan.from_dict(json.loads(json.dumps(asdict(plan))))
    assert read == plan and read.states() == {"key": inputs[1]}
    assert read.weights[0][0].read_array().tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    with pytest.raises(RankError, match="graphs") as caught:
        load_plan({"weights": []}, -1)
    assert caught.value.doing == "reading what to load"
