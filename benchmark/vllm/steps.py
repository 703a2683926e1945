# SPDX-License-Identifier: Apache-2.0
"""Where the time of an engine's steps goes, from noted spans of time. Runs nothing and imports no vLLM."""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


# Parts of a step: a run of a graph; the plugin's runner; vLLM's scheduler; and what vLLM makes of a step's tokens. The core is
# what calls the first three.
GRAPH, RUNNER, SCHEDULER, CORE, OUTPUTS = "graph", "runner", "scheduler", "core", "outputs"


class Span(NamedTuple):
    """A call: of which part, from when to when in seconds, in which thread, and of a graph its name."""

    part: str
    start: float
    end: float
    thread: int = 0
    graph: str = ""


@dataclass(frozen=True)
class Step:
    """The time from the start of one run of a graph to the start of the next; all but the name are ms.

    Attributes:
        graph_ms: of it, inside the graph. With async scheduling it contains waits for Python's lock.
        plugin_ms: what the plugin took. With async scheduling, part of this and of the next two passes beside a graph.
        scheduler_ms: what vLLM's scheduler took, without what it asks the plugin.
        outputs_ms: what vLLM took to make text and statistics of a step's tokens. In a server another process does it.
    """

    graph: str
    step_ms: float
    graph_ms: float
    plugin_ms: float
    scheduler_ms: float
    outputs_ms: float


class Recorder:
    """Notes calls of functions that it replaces on their objects, while it is on."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.on = False

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Replaces a method of one object. A graph's name is the first argument of its run."""
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if self.on:
                    graph = args[0] if part == GRAPH else ""
                    self.spans.append(Span(part, start, time.perf_counter(), threading.get_ident(), graph))

        setattr(owner, name, noted)


def own_times(spans: Iterable[Span]) -> list[tuple[Span, float]]:
    """Spans by their start, each with its time less that of the spans directly inside it, in seconds."""
    ordered = sorted(spans, key=lambda span: (span.start, -span.end))
    own = [span.end - span.start for span in ordered]
    around: dict[int, list[int]] = defaultdict(list)
    for index, span in enumerate(ordered):
        stack = around[span.thread]
        while stack and ordered[stack[-1]].end <= span.start:
            stack.pop()
        if stack:
            own[stack[-1]] -= span.end - span.start
        stack.append(index)
    return list(zip(ordered, own, strict=True))


def steps_of(spans: Iterable[Span]) -> list[Step]:
    """The steps between the first run of a graph and the last. A call counts for the step in which it began."""
    steps: list[Step] = []
    run: Span | None = None
    taken: dict[str, float] = defaultdict(float)
    for span, own in own_times(spans):
        if span.part == GRAPH:
            if run is not None:
                steps.append(_step(run, span, taken))
            run, taken = span, defaultdict(float)
        taken[span.part] += 1e3 * own
    return steps


def _step(run: Span, following: Span, taken: dict[str, float]) -> Step:
    return Step(
        graph=run.graph,
        step_ms=1e3 * (following.start - run.start),
        graph_ms=1e3 * (run.end - run.start),
        plugin_ms=taken[RUNNER],
        scheduler_ms=taken[SCHEDULER],
        outputs_ms=taken[OUTPUTS],
    )


def medians(steps: Sequence[Step], kind: str) -> dict[str, float]:
    """Medians over the steps of one kind of graph, and how many there are.

    Raises:
        ValueError: there is none.
    """
    chosen = [asdict(step) for step in steps if step.graph.startswith(kind)]
    if not chosen:
        raise ValueError(f"none of the {len(steps)} steps ran a {kind} graph")
    found = {name: statistics.median(step[name] for step in chosen) for name in chosen[0] if name != "graph"}
    return found | {"steps": len(chosen)}


def with_idle(engines: Mapping[str, Mapping[str, float]], alone: str) -> dict[str, dict[str, float]]:
    """Adds `idle_ms` to medians by engine: how long the graphs stand still between two steps.

    It is a step's time beyond that of a graph in the engine `alone`, in which nothing runs beside one.
    """
    return {
        name: {**numbers, "idle_ms": numbers["step_ms"] - engines[alone]["graph_ms"]}
        for name, numbers in engines.items()
    }


def over_rounds(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians over rounds; then the shares that idle time and plugin have of a step."""
    found = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    return found | {f"{part}_share": found[f"{part}_ms"] / found["step_ms"] for part in ("idle", "plugin")}
