# SPDX-License-Identifier: Apache-2.0
"""Times of steps: by their graph alone, or on a CPU by the tokens and columns in use. Measures nothing; needs no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from ...core import PromptPiece, Step
from ...engine.scheduler import Scheduler
from ...step.family import rows_needed
from ...step.spec import GraphSpec
from .simulate import StepSeconds


class StepClock:
    """Times of one config's steps: a step takes what its graph takes, whatever is in use of it.

    Args:
        graphs: graphs of one config.
        seconds: time of each.
    """

    def __init__(self, graphs: tuple[GraphSpec, ...], seconds: Callable[[GraphSpec], float]) -> None:
        self._seconds = {graph: seconds(graph) for graph in graphs}

    def draw_times(self) -> StepSeconds:
        """Return the times of steps as they come, some slower than others; the same at each call."""
        return lambda step, scheduler: self._seconds[step.graph]


@dataclass(frozen=True)
class Curve:
    """Measured values at ascending places, with straight lines in between, and the nearest value beyond."""

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
class ChunkCurves:
    """Times of steps with chunks of one size; places of all curves are prompt tokens up to the last live one.

    Attributes:
        alone: seconds of a prompt's first tokens, in a step without decode rows.
        mixed: the same in a mixed step with all decode rows in use, which see nothing; None where there is none.
        unread: seconds less where no chunk ends its prompt, so that no output is needed.
        column: seconds for each token and column before the chunk.
    """

    alone: Curve
    mixed: Curve | None
    unread: Curve
    column: Curve


@dataclass(frozen=True, kw_only=True)
class CpuClock(StepClock):
    """Times on a CPU, which computes the tokens of a step up to the last live one, and attends to what each of them sees.

    Attributes:
        decode: by rows up to the last that decodes, seconds of a step with rows that see nothing.
        decode_column: by the same, seconds for each column that a row sees.
        chunks: by chunk size.
        host: by requests of a step, the engine's own time.
        copied_token: seconds for each token of a prefix that is copied from slot to slot.
        ratios: times of runs over the median of their step: some are slower, as something else wants a core.
        woken: seconds more of the first step after a pause, in which cores and threads went to sleep.
        turned: seconds more of a step that only decodes, after one with chunks, which had the caches.
    """

    decode: Curve
    decode_column: Curve
    chunks: Mapping[int, ChunkCurves]
    host: Curve
    copied_token: float
    ratios: tuple[float, ...] = (1.0,)
    woken: float = 0.0
    turned: float = 0.0

    def draw_times(self) -> StepSeconds:
        ratios = cycle(np.random.default_rng(0).permutation(self.ratios).tolist())
        before: GraphSpec | None = None

        def seconds(step: Step, scheduler: Scheduler) -> float:
            nonlocal before
            total = self.time_step(step, scheduler)
            if not len(scheduler.queues.running) and not len(scheduler.queues.prefilling):
                total += self.woken
            elif before is not None and before.has_chunk and not step.graph.has_chunk:
                total += self.turned
            before = step.graph
            return next(ratios) * total

        return seconds

    def time_step(self, step: Step, scheduler: Scheduler) -> float:
        """Return the seconds of a step that the scheduler has planned and not committed yet."""
        graph = step.graph
        rows = graph.batch_size if graph.has_chunk else max((decode.slot for decode in step.decodes), default=0) + 1
        columns = sum(scheduler.find_state(decode.request_id).context for decode in step.decodes)
        total = self.host(len(step.decodes) + len(step.pieces)) + self.decode_column(rows) * columns
        if not graph.has_chunk:
            return total + self.decode(rows)
        times = self.chunks[graph.chunk_size]
        live = _live_tokens(step.pieces, graph.chunk_size)
        total += times.column(live) * sum(chunk.count * chunk.start for chunk in step.pieces)
        total += self.copied_token * sum(copy.length for copy in step.copies)
        if graph.kind == "mixed":
            assert times.mixed is not None
            return total + times.mixed(live)
        return total + times.alone(live) - (0.0 if any(chunk.is_last for chunk in step.pieces) else times.unread(live))


def _live_tokens(chunks: tuple[PromptPiece, ...], chunk_size: int) -> int:
    """Count tokens of chunk rows up to the last live one: a row is filled before the next one, and holds one prompt."""
    rows = rows_needed([chunk.count for chunk in chunks], chunk_size)
    return (rows - 1) * chunk_size + (chunks[-1].count - 1) % chunk_size + 1
