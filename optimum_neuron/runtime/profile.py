# SPDX-License-Identifier: Apache-2.0
"""A profile: what a process runs, in Chrome's trace event format, and what a Neuron device's runtime captures. Imports no torch.

ui.perfetto.dev and chrome://tracing read it. Times in the file are microseconds since the trace was made. The format: "Trace Event
Format", of the Chromium project.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from ..artifact.filesystem import replace_file
from ..config import NEURON_TARGETS


Track = Literal["steps", "graphs", "operators"]
# In the order in which they are shown, as threads of the file's one process.
TRACKS: tuple[Track, ...] = ("steps", "graphs", "operators")
_PROCESS = 1

now = time.perf_counter_ns


class RunTrace:
    """Spans on tracks and counters over time, kept until `to_dict`."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self._start = now()
        self._events: list[dict[str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._events)

    def add_span(self, track: Track, name: str, start: int, **facts: Any) -> int:
        """Note what began at `start`, by `now`, and ends here; return when that is."""
        end, thread = now(), TRACKS.index(track) + 1
        times = {"ts": self._microseconds(start), "dur": (end - start) / 1000}
        self._events.append({"name": name, "cat": track, "ph": "X", **times, "tid": thread, "args": facts})
        return end

    def add_count(self, name: str, at: int, **values: int) -> None:
        """Note that a counter has these values from then on."""
        self._events.append({"name": name, "ph": "C", "ts": self._microseconds(at), "args": values})

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON takes. On each track events stand in the order in which they began, the longest first."""
        title = f"optimum-neuron, target {self.facts.get('target')}"
        about: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "args": {"name": title}}]
        for number, track in enumerate(TRACKS, 1):
            if any(event.get("cat") == track for event in self._events):
                for name, value in (("name", track), ("sort_index", number)):
                    about.append({"name": f"thread_{name}", "ph": "M", "tid": number, "args": {name: value}})
        events = sorted(self._events, key=lambda each: (each.get("tid", 0), each["ts"], -each.get("dur", 0)))
        traced = [event | {"pid": _PROCESS} for event in (*about, *events)]
        return {"displayTimeUnit": "ms", "otherData": self.facts, "traceEvents": traced}

    def _microseconds(self, at: int) -> float:
        return (at - self._start) / 1000


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
        """Make the folder; raise FileExistsError if something has its name; OSError if it cannot be made."""
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise type(error)(
                f"a profile cannot be written to {self.folder} ({error.strerror}); name a new folder"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        """Write the trace, whole or not at all, even of a run that failed."""
        if self.trace:
            replace_file(self.folder / TRACE_NAME, json.dumps(self.trace.to_dict(), separators=(",", ":")) + "\n")
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
