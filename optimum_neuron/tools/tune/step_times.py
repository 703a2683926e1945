# SPDX-License-Identifier: Apache-2.0
"""How long steps take: by their graph alone, or on a CPU also by what of it is in use. Measures nothing; needs no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

import numpy as np

from ...engine.scheduler import Scheduler
from ...engine.step import ScheduledChunk, Step
from ...step.family import rows_needed
from ...step.spec import GraphKind, GraphSpec
from .simulate import StepSeconds


class StepTimes(Protocol):
    """Of one config's steps, in seconds."""

    def seconds(self, step: Step, scheduler: Scheduler) -> float:
        """Of a step that the scheduler has planned and not committed yet."""

    def drawn(self) -> StepSeconds:
        """The same as they come, some slower than others; the same each time that this is called."""

    def least(self, kind: GraphKind) -> float:
        """What no step of a kind is faster than."""


class GraphTimes:
    """A step takes what its graph takes, whatever of its rows and columns is in use.

    Args:
        graphs: of one config.
        seconds: of each.
    """

    def __init__(self, graphs: tuple[GraphSpec, ...], seconds: Callable[[GraphSpec], float]) -> None:
        self._seconds = {graph: seconds(graph) for graph in graphs}

    def seconds(self, step: Step, scheduler: Scheduler) -> float:
        return self._seconds[step.graph]

    def drawn(self) -> StepSeconds:
        return self.seconds

    def least(self, kind: GraphKind) -> float:
        return min(seconds for graph, seconds in self._seconds.items() if graph.kind == kind)


@dataclass(frozen=True)
class Curve:
    """Measured values at ascending places; straight lines in between, and the nearest value beyond."""

    places: tuple[int, ...]
    values: tuple[float, ...]

    def __call__(self, place: int) -> float:
        at = bisect_left(self.places, place)
        if at == len(self.places):
            return self.values[-1]
        if at == 0 or self.places[at] == place:
            return self.values[at]
        low, high = self.places[at - 1], self.places[at]
        share = (place - low) / (high - low)
        return self.values[at - 1] * (1 - share) + self.values[at] * share


@dataclass(frozen=True, kw_only=True)
class ChunkTimes:
    """Of the steps with chunks of one size; places of all curves are prompt tokens up to the last live one.

    Attributes:
        alone: seconds of a prompt's first tokens, in a step without decode rows.
        beside: the same in a mixed step, all of whose decode rows are in use and see nothing; None where there is none.
        unread: seconds less where no chunk ends its prompt: nobody then needs an output.
        column: seconds for each token and column before the chunk.
    """

    alone: Curve
    beside: Curve | None
    unread: Curve
    column: Curve


@dataclass(frozen=True, kw_only=True)
class LiveTimes:
    """The cpu target computes the tokens of a step up to the last live one, and attends to what each of them sees.

    Attributes:
        decode: by rows up to the last that decodes, seconds of a step whose rows see nothing.
        decode_column: by the same, seconds for each column that a row sees.
        chunks: by chunk size.
        host: by requests of a step, what the engine takes beside the graph.
        copied_token: seconds for each token of a prefix that is copied from slot to slot.
        ratios: of runs of steps, over the median of their step: some are slower, as something else wants a core.
        woken: seconds more of the first step after a pause, in which cores and threads went to sleep.
        turned: seconds more of a step that only decodes, behind one with chunks: that one had the caches.
    """

    decode: Curve
    decode_column: Curve
    chunks: Mapping[int, ChunkTimes]
    host: Curve
    copied_token: float
    ratios: tuple[float, ...] = (1.0,)
    woken: float = 0.0
    turned: float = 0.0

    def drawn(self) -> StepSeconds:
        ratios = cycle(np.random.default_rng(0).permutation(self.ratios).tolist())
        before: GraphSpec | None = None

        def seconds(step: Step, scheduler: Scheduler) -> float:
            nonlocal before
            total = self.seconds(step, scheduler)
            if not scheduler.running and not scheduler.prefilling:
                total += self.woken
            elif before is not None and before.has_chunk and not step.graph.has_chunk:
                total += self.turned
            before = step.graph
            return next(ratios) * total

        return seconds

    def seconds(self, step: Step, scheduler: Scheduler) -> float:
        total = self.host(len(step.decodes) + len(step.chunks))
        graph = step.graph
        rows = graph.batch_size if graph.has_chunk else max((decode.slot for decode in step.decodes), default=0) + 1
        columns = sum(scheduler.state(decode.request_id).context for decode in step.decodes)
        total += self.decode_column(rows) * columns
        if not graph.has_chunk:
            return total + self.decode(rows)
        times = self.chunks[graph.chunk_size]
        live = live_chunk_tokens(step.chunks, graph.chunk_size)
        total += times.column(live) * sum(chunk.count * chunk.start for chunk in step.chunks)
        total += self.copied_token * sum(_copied(chunk) for chunk in step.chunks)
        if graph.kind == "mixed":
            assert times.beside is not None
            return total + times.beside(live)
        return total + times.alone(live) - (0.0 if any(chunk.is_last for chunk in step.chunks) else times.unread(live))

    def least(self, kind: GraphKind) -> float:
        return min(self.ratios) * (min(self.host.values) + self._least(kind))

    def _least(self, kind: GraphKind) -> float:
        if kind == "token_generation":
            return min(self.decode.values)
        sizes = self.chunks.values()
        if kind == "mixed":
            return min(min(each.beside.values) for each in sizes if each.beside is not None)
        return min(min(each.alone.values) - max(each.unread.values) for each in sizes)


def live_chunk_tokens(chunks: tuple[ScheduledChunk, ...], chunk_size: int) -> int:
    """Tokens of chunk rows up to the last live one: a row is filled before the next one is begun, and holds one prompt."""
    rows = rows_needed([chunk.count for chunk in chunks], chunk_size)
    return (rows - 1) * chunk_size + (chunks[-1].count - 1) % chunk_size + 1


def _copied(chunk: ScheduledChunk) -> int:
    reuse = chunk.reuse
    return 0 if reuse is None or reuse.source_slot in (None, chunk.slot) else reuse.length
