# SPDX-License-Identifier: Apache-2.0
"""A profile: what a process runs, in Chrome's trace event format, and what a Neuron device's runtime captures. Imports no torch.

ui.perfetto.dev and chrome://tracing read it. Times in the file are microseconds since the trace was made. The format: "Trace Event
Format", of the Chromium project.
"""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..config import NEURON_TARGETS


Track = Literal["steps", "graphs", "operators"]
# In the order in which they are shown. Their numbers are threads of the file's one process.
TRACKS: tuple[Track, ...] = ("steps", "graphs", "operators")
_PROCESS = 1

now = time.perf_counter_ns


class _TraceSpan(NamedTuple):
    track: Track
    name: str
    start: int
    end: int
    facts: dict[str, Any]


class RunTrace:
    """Spans on tracks and counters over time, kept until `to_dict`."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self._start = now()
        self._spans: list[_TraceSpan] = []
        self._counts: list[tuple[str, int, dict[str, int]]] = []

    def __bool__(self) -> bool:
        """Return whether anything happened."""
        return bool(self._spans)

    def add_span(self, track: Track, name: str, start: int, **facts: Any) -> int:
        """Note what began at `start`, by `now`, and ends here; return when that is."""
        end = now()
        self._spans.append(_TraceSpan(track, name, start, end, facts))
        return end

    def add_count(self, name: str, at: int, **values: int) -> None:
        """Note that a counter has these values from then on."""
        self._counts.append((name, at, values))

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON takes. On each track events stand in the order in which they began, the longest first."""
        spans = sorted(self._spans, key=lambda each: (TRACKS.index(each.track), each.start, -each.end))
        used = [track for track in TRACKS if any(span.track == track for span in spans)]
        return {
            "displayTimeUnit": "ms",
            "otherData": self.facts,
            "traceEvents": [
                _metadata("process_name", {"name": f"optimum-neuron, target {self.facts.get('target')}"}),
                *(_metadata("thread_name", {"name": track}, _thread_number(track)) for track in used),
                *(
                    _metadata("thread_sort_index", {"sort_index": _thread_number(track)}, _thread_number(track))
                    for track in used
                ),
                *(self._describe_span(span) for span in spans),
                *(self._describe_count(*count) for count in self._counts),
            ],
        }

    def _describe_span(self, span: _TraceSpan) -> dict[str, Any]:
        return {
            "name": span.name,
            "cat": span.track,
            "ph": "X",
            "ts": self._microseconds(span.start),
            "dur": (span.end - span.start) / 1000,
            "pid": _PROCESS,
            "tid": _thread_number(span.track),
            "args": span.facts,
        }

    def _describe_count(self, name: str, at: int, values: dict[str, int]) -> dict[str, Any]:
        return {"name": name, "ph": "C", "ts": self._microseconds(at), "pid": _PROCESS, "args": values}

    def _microseconds(self, at: int) -> float:
        return (at - self._start) / 1000


def _thread_number(track: Track) -> int:
    return TRACKS.index(track) + 1


def _metadata(name: str, values: dict[str, Any], thread: int | None = None) -> dict[str, Any]:
    event = {"name": name, "ph": "M", "pid": _PROCESS, "args": values}
    return event if thread is None else event | {"tid": thread}


TRACE_NAME, CAPTURE_NAME = "trace.json", "device"


class Profile:
    """A folder for the trace of models that are loaded with it while its context is open; it is written at the end.

    On the cpu, eager and hlo targets it holds all there is. The processes that hold a Neuron device's ranks write what they
    capture to a folder next to it, the last of it as they end.

    Attributes:
        folder: new with this profile; gone again where nothing ran.
        trace: what ran.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self.trace = RunTrace()

    def __enter__(self) -> Profile:
        """Make the folder.

        Raises:
            FileExistsError: something has its name.
            OSError: it cannot be made.
        """
        try:
            self.folder.mkdir(parents=True)
        except FileExistsError:
            raise FileExistsError(
                f"a profile would be written to {self.folder}, which exists; name a new folder"
            ) from None
        except OSError as error:
            raise OSError(
                f"a profile cannot be written to {self.folder} ({error.strerror}); name another folder"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        """Write the trace, whole or not at all, even of a run that failed."""
        if self.trace:
            text = json.dumps(self.trace.to_dict(), separators=(",", ":"))
            unfinished = self.folder / f".{TRACE_NAME}.partial"
            try:
                unfinished.write_text(text + "\n", encoding="utf-8")
                unfinished.replace(self.folder / TRACE_NAME)
            finally:
                unfinished.unlink(missing_ok=True)
        for folder in (self.folder / CAPTURE_NAME, self.folder):
            with suppress(OSError):  # not empty
                folder.rmdir()

    def capture_folder(self, target: str) -> Path | None:
        """Return the folder that the runtime of a device's ranks writes to; None for a target that has none."""
        if target not in NEURON_TARGETS:
            return None
        folder = self.folder / CAPTURE_NAME
        folder.mkdir(exist_ok=True)
        return folder


def profile_to(folder: Path | None) -> AbstractContextManager[Profile | None]:
    """Return a profile in a new folder, or none."""
    return nullcontext() if folder is None else Profile(folder)
