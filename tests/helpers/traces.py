# SPDX-License-Identifier: Apache-2.0
"""Reads a profile's trace, and holds it to the rules of Chrome's trace event format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from optimum_neuron.runtime.profile import TRACE_NAME


SLACK = 1e-6  # microseconds that sums of floats may be off by


@dataclass(frozen=True)
class Told:
    """The events of a trace: complete ones by track, in their order in the file, and counters."""

    tracks: dict[str, list[dict[str, Any]]]
    counters: list[dict[str, Any]]
    facts: dict[str, Any]

    def names(self, track: str) -> list[str]:
        return [event["name"] for event in self.tracks.get(track, [])]


def read_trace(folder: Path) -> Told:
    """What a profile holds; fails where it breaks a rule of the format."""
    content = json.loads((folder / TRACE_NAME).read_text(encoding="utf-8"), parse_constant=_no_number)
    events = content["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X", "C"}
    assert {event["pid"] for event in events} == {1} and content["displayTimeUnit"] in ("ms", "ns")
    about = [event for event in events if event["ph"] == "M"]
    threads = {event["tid"]: event["args"]["name"] for event in about if event["name"] == "thread_name"}
    assert [event["args"]["name"] for event in about if event["name"] == "process_name"]
    tracks: dict[str, list[dict[str, Any]]] = {name: [] for name in threads.values()}
    for event in events:
        if event["ph"] == "X":
            assert event["name"] and event["cat"] and isinstance(event["args"], dict)
            tracks[threads[event["tid"]]].append(event)
    for track in tracks.values():
        _check_track(track)
    counters = [event for event in events if event["ph"] == "C"]
    for event in counters:
        assert event["ts"] >= 0 and event["args"] and all(type(value) is int for value in event["args"].values())
    return Told(tracks, counters, content["otherData"])


def end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def lies_in(event: dict[str, Any], others: list[dict[str, Any]]) -> bool:
    return any(other["ts"] <= event["ts"] + SLACK and end(event) <= end(other) + SLACK for other in others)


def _check_track(events: list[dict[str, Any]]) -> None:
    """Times of one thread go forward, and its spans lie in one another or apart."""
    assert events and all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
    open_spans: list[dict[str, Any]] = []
    for before, event in pairwise(events):
        assert before["ts"] <= event["ts"]
        open_spans.append(before)
        open_spans = [span for span in open_spans if end(span) > event["ts"] + SLACK]
        assert all(end(event) <= end(span) + SLACK for span in open_spans), "two spans overlap"


def _no_number(text: str) -> Any:
    raise AssertionError(f"{text} is no JSON")
