# SPDX-License-Identifier: Apache-2.0
"""What happened when, in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing read. Imports no torch.

Times in the file are microseconds since the trace was made. The format: "Trace Event Format", of the Chromium project.
"""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple


Track = Literal["steps", "graphs", "operators"]
# In the order in which they are shown. Their numbers are threads of the file's one process.
TRACKS: tuple[Track, ...] = ("steps", "graphs", "operators")
_PROCESS = 1

now = time.perf_counter_ns


class _Span(NamedTuple):
    track: Track
    name: str
    start: int
    end: int
    facts: dict[str, Any]


class Trace:
    """Spans on tracks and counters over time, kept until `to_dict`."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self._start = now()
        self._spans: list[_Span] = []
        self._counts: list[tuple[str, int, dict[str, int]]] = []

    def __bool__(self) -> bool:
        """Whether anything happened."""
        return bool(self._spans)

    def span(self, track: Track, name: str, start: int, **facts: Any) -> int:
        """Something that began at `start`, as `now` tells, and ends here; returns when that is."""
        end = now()
        self._spans.append(_Span(track, name, start, end, facts))
        return end

    def count(self, name: str, at: int, **values: int) -> None:
        """A counter has these values from then on."""
        self._counts.append((name, at, values))

    def to_dict(self) -> dict[str, Any]:
        """For JSON. On each track events stand in the order in which they began, the longest first."""
        spans = sorted(self._spans, key=lambda each: (TRACKS.index(each.track), each.start, -each.end))
        used = [track for track in TRACKS if any(span.track == track for span in spans)]
        return {
            "displayTimeUnit": "ms",
            "otherData": self.facts,
            "traceEvents": [
                _metadata("process_name", {"name": f"optimum-neuron, target {self.facts.get('target')}"}),
                *(_metadata("thread_name", {"name": track}, _thread(track)) for track in used),
                *(_metadata("thread_sort_index", {"sort_index": _thread(track)}, _thread(track)) for track in used),
                *(self._complete(span) for span in spans),
                *(self._counter(*count) for count in self._counts),
            ],
        }

    def _complete(self, span: _Span) -> dict[str, Any]:
        return {
            "name": span.name,
            "cat": span.track,
            "ph": "X",
            "ts": self._microseconds(span.start),
            "dur": (span.end - span.start) / 1000,
            "pid": _PROCESS,
            "tid": _thread(span.track),
            "args": span.facts,
        }

    def _counter(self, name: str, at: int, values: dict[str, int]) -> dict[str, Any]:
        return {"name": name, "ph": "C", "ts": self._microseconds(at), "pid": _PROCESS, "args": values}

    def _microseconds(self, at: int) -> float:
        return (at - self._start) / 1000


def _thread(track: Track) -> int:
    return TRACKS.index(track) + 1


def _metadata(name: str, values: dict[str, Any], thread: int | None = None) -> dict[str, Any]:
    event = {"name": name, "ph": "M", "pid": _PROCESS, "args": values}
    return event if thread is None else event | {"tid": thread}
