# SPDX-License-Identifier: Apache-2.0
"""The benchmark of blocks under users: who sends when, what is counted of it, and what its results are called."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark import model
from benchmark.serving import blocks, stall
from benchmark.serving.report import BLOCKS
from benchmark.serving.workloads import Job, PromptSource, Trace, Users


@dataclass
class FakeServer:
    """Has `rows` requests at a time, each of which gets a token in every step; its clock is its own."""

    name: str
    rows: int
    step_seconds: float = 1.0
    vocab_size: int = 100

    def serve(self, jobs: Sequence[Job]) -> Trace:
        trace, coming, queue, now = Trace(rows=self.rows), list(jobs), list[Job](), 0.0
        self.in_flight: list[tuple[int, int]] = []  # in each step, of how many that are still to come
        while coming or queue:
            for job in [job for job in coming if job.due(trace, now)]:
                coming.remove(job)
                queue.append(job)
                trace.submitted[job.name] = now
            self.in_flight.append((len(queue), len(coming)))
            now += self.step_seconds
            for job in queue[: self.rows]:
                trace.tokens.setdefault(job.name, []).append(now)
            queue = [job for job in queue if trace.count(job.name) < job.new_tokens]
        return trace


USERS = Users(users=6, requests=30, prompt=5, new_tokens=20, tail=0.9, longest=200)


def test_as_many_requests_as_users_are_in_flight_until_the_last_one_is_sent() -> None:
    server = FakeServer("fake", rows=4)
    trace = server.serve(USERS.jobs(PromptSource(100, 0)))
    assert {count for count, to_come in server.in_flight if to_come} == {USERS.users}
    assert list(trace.submitted) == [str(number) for number in range(USERS.requests)]


def test_tokens_are_counted_from_when_all_rows_are_taken_until_the_last_request_comes() -> None:
    trace = FakeServer("fake", rows=4).serve(USERS.jobs(PromptSource(100, 0)))
    trace.submitted["0"] -= 50.0  # whatever comes before does not count
    found = USERS.results(trace)
    assert found["tok_s"] == pytest.approx(4.0)
    assert found["generating"] == pytest.approx(4.0, rel=0.1)  # none of its first and last moments
    assert found["itl_max_ms"] == pytest.approx(1000)


def test_requests_that_all_come_before_the_rows_are_taken_measure_nothing() -> None:
    trace = Trace(submitted={"a": 0.0, "b": 1.0}, tokens={"a": [2.0, 3.0], "b": [3.0, 4.0]}, rows=2)
    with pytest.raises(ValueError, match=r"the last of 2 requests came before 2 rows were taken: have more requests"):
        trace.queued()


def test_cache_that_holds_nothing_is_told_where_the_system_tells() -> None:
    assert Trace().cache() == {}
    trace = Trace(taken_tokens=400, filled_tokens=300, counters={"preemptions": 2})
    assert trace.cache() == {"preempted": 2, "unfilled_percent": 25}


def arguments(monkeypatch: pytest.MonkeyPatch, command: Any, *typed: str) -> Namespace:
    monkeypatch.setattr(sys, "argv", [command.__name__, *typed])
    parsed: Namespace = command.parse_arguments()
    return parsed


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("--users", "8"), "--users 8 do not fill --rows 24 and --slots 4: raise --users"),
        (("--users", "32", "--requests", "32"), "--requests 32 all come at once with --users 32"),
    ],
)
def test_sizes_that_measure_nothing_are_refused(
    typed: Sequence[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments(monkeypatch, blocks, *typed)
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.fixture
def _fake_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have 6 rows, slots 4; steps take as long."""

    def open_server(through: str, name: str, artifact: Path, opened: ExitStack) -> FakeServer:
        return FakeServer(f"{through}: {name}", rows=4 if name == blocks.SLOTS else 6)

    monkeypatch.setattr(blocks, "open_server", open_server)
    monkeypatch.setattr(model, "export", lambda checkpoint, config, folder: SimpleNamespace(path=folder))
    monkeypatch.setattr(
        stall, "packing_servers", lambda checkpoint, args, folder: [FakeServer("fake", args.slots, 0.1)]
    )


SMALL = ("--model", "m", "--rows", "6", "--users", "7", "--requests", "30", "--new-tokens", "20", "--repeats", "2")


@pytest.mark.usefixtures("_fake_systems")
def test_results_name_the_command_that_made_them_and_compare_blocks_with_slots_of_the_same_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = arguments(monkeypatch, blocks, *SMALL, "--through", "engine", "--block-sizes", "64", "128")
    results = blocks.run(args, tmp_path)
    found = json.loads(json.dumps(results.to_dict()))
    assert found["benchmark"] == "blocks" and "traces" not in found
    assert list(found["numbers"]["users"]) == ["engine: slots", "engine: blocks of 64", "engine: blocks of 128"]
    slots = {(row.group, row.what): row.ahead()["slots"] for row in BLOCKS.compared(found)}
    for size in (64, 128):
        assert slots[f"engine: blocks of {size}", "tok/s"] == pytest.approx(1 / 1.5)
        assert slots[f"engine: blocks of {size}", "ITL p99 ms"] == pytest.approx(1)
    assert BLOCKS.picture is not None
    drawn = BLOCKS.picture(found).svg()
    assert drawn.count(">blocks of 64<") == drawn.count(">slots<") >= 2
    packing = arguments(monkeypatch, stall, "--model", "m", "--scenarios", "packing", "--repeats", "1")
    assert stall.run(packing, tmp_path).to_dict()["benchmark"] == "stall"
