# SPDX-License-Identifier: Apache-2.0
"""Times of an artifact's steps on this CPU, with its real weights: each graph with few and with all of its tokens, and the engine beside it.

Contents of the cache do not matter to times, so slots are said to hold tokens that nobody computed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...artifact.artifact import Artifact
from ...config import NeuronConfig
from ...engine.engine import Engine
from ...engine.request import Request
from ...runtime.runner import GraphRunner
from ...runtime.step_tensors import Chunk, DecodeRows, StepOutput
from ...runtime.stopwatch import seconds_of
from ...step.spec import GraphSpec
from ...targets import Executable
from .step_times import ChunkTimes, Curve, LiveTimes


# Rounds over all steps, and in each of them runs of a step: at least so many, and more while they are short.
ROUNDS, LEAST_RUNS, MOST_RUNS, ENOUGH_S = 3, 2, 8, 0.1
STAGES = ROUNDS + 1
# Steps behind a pause, and seconds of it: as long as a server waits for the next request.
PAUSES, PAUSE_S = 12, 0.15
# Chunks of fewer tokens than the first are as slow as decode rows are; between two of these, times grow evenly.
_CHUNK_TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
# Decode steps from which the engine's own time is taken, and the runs of them.
_HOST_STEPS, _HOST_RUNS = 24, 3


class TimedRunner(GraphRunner):
    """A runner that adds up how long its steps take."""

    spent = 0.0

    def step(self, *arguments: Any, **options: Any) -> StepOutput:
        start = time.perf_counter()
        output = super().step(*arguments, **options)
        self.spent += time.perf_counter() - start
        return output


class _Step(NamedTuple):
    """A step that is measured.

    Attributes:
        rows: that decode, each of which sees `columns` of the cache, its own included.
        tokens: of a prompt, behind `start` others, in the slot behind those rows, or in the last one.
        outputs: whether somebody reads any.
    """

    graph: GraphSpec
    rows: int = 0
    columns: int = 0
    tokens: int = 0
    start: int = 0
    outputs: bool = True


class Measured(NamedTuple):
    """What was found.

    Attributes:
        runs: of all steps together.
        spread: the middle half of a step's runs over their median, on average.
    """

    times: LiveTimes
    runs: int
    spread: float


class _Taken:
    def __init__(self, runner: TimedRunner, vocab_size: int) -> None:
        self.runner, self.vocab_size = runner, vocab_size
        self.taken: dict[_Step, list[float]] = {}

    def take(self, step: _Step) -> None:
        """Runs a step a few times."""
        run = self.run(step)
        run()  # the first one finds cold caches
        times: list[float] = []
        while len(times) < LEAST_RUNS or (len(times) < MOST_RUNS and sum(times) < ENOUGH_S):
            times.append(run())
        self.taken.setdefault(step, []).extend(times)

    def run(self, step: _Step) -> Callable[[], float]:
        """What runs a step once, and returns its seconds."""
        runner = self.runner
        slots = runner.config.batch_size
        rows = min(step.rows, slots - 1) if step.tokens else step.rows
        decoding = np.arange(slots) < rows
        zeros = DecodeRows(
            np.zeros(slots, np.int32), decoding, np.zeros((slots, 4), np.float32), np.zeros(slots, np.float32)
        )
        chunks = [Chunk(rows, np.arange(step.tokens, dtype=np.int32) % self.vocab_size)] if step.tokens else []

        def run() -> float:
            runner.lengths[:] = np.where(decoding, step.columns - 1, 0)
            if step.tokens:
                runner.lengths[rows] = step.start
            return seconds_of(lambda: runner.step(chunks, zeros if rows else None, step.graph, outputs=step.outputs))

        return run

    def median(self, step: _Step) -> float:
        """Seconds of a step that was taken."""
        return statistics.median(self.taken[step])

    def ratios(self) -> tuple[float, ...]:
        return tuple(spent / self.median(step) for step, times in self.taken.items() for spent in times)

    def spread(self) -> float:
        halves = [
            np.subtract(*np.percentile(times, (75, 25))) / self.median(step) for step, times in self.taken.items()
        ]
        return float(np.mean(halves))


def measure(artifact: Artifact, executable: Executable, advance: Callable[[str], None]) -> Measured:
    """Measures all graphs of an artifact of the cpu target.

    Args:
        advance: called `STAGES` times.

    Raises:
        ValueError: the cache has blocks.
    """
    config = artifact.config
    if config.kv_block_size is not None:
        raise ValueError(
            f"{artifact.path} has a cache of blocks (kv_block_size={config.kv_block_size}), and steps of such are not measured; export with "
            f"slots"
        )
    runner = TimedRunner(executable, config, artifact.graphs, artifact.model)
    runner.warm_up()
    watch = _Taken(runner, min(artifact.model.vocab_size, artifact.model.num_embeddings))
    plan = _Plan(runner)
    # What takes the cores for a while meets some of a step's runs, not all.
    for number in range(ROUNDS):
        for step in plan.steps():
            watch.take(step)
        advance(f"round {number + 1} of {ROUNDS}")
    host, copied, after = _host(runner, config, watch.vocab_size), _copied(runner), plan.afterwards(watch)
    advance("the engine")
    runner.reset_all()
    times = plan.times(watch, host, copied, after)
    return Measured(times, sum(map(len, watch.taken.values())), watch.spread())


class _Plan:
    """Which steps of a runner's graphs are measured, and what follows from them."""

    def __init__(self, runner: GraphRunner) -> None:
        config = self._config = runner.config
        # Of the longest context: on a CPU, attention ends at each token's own place.
        self._graphs = {(graph.kind, graph.chunk_size): graph for graph in runner.family}
        self._rows = _doubling(config.batch_size)
        self._few, self._many = min(16, config.sequence_length // 4 or 1), config.sequence_length - 1

    def steps(self) -> Iterator[_Step]:
        """All of them."""
        for rows in self._rows:
            yield from (self._decode(rows, columns) for columns in (self._few, self._many))
        for size in self._config.chunk_sizes:
            for tokens in self._tokens(size):
                yield self._alone(size, tokens)
                yield self._alone(size, tokens, start=self._config.sequence_length - tokens)
                yield self._alone(size, tokens, outputs=False)
                if self._config.mixed_step:
                    yield self._beside(size, tokens)

    def _tokens(self, size: int) -> tuple[int, ...]:
        most = self._config.ctx_batch_size * size
        return (*(count for count in _CHUNK_TOKENS if count < most), most)

    def _decode(self, rows: int, columns: int) -> _Step:
        return _Step(self._graphs["token_generation", 0], rows=rows, columns=columns)

    def _alone(self, size: int, tokens: int, *, start: int = 0, outputs: bool = True) -> _Step:
        return _Step(self._graphs["chunked_prefill", size], tokens=tokens, start=start, outputs=outputs)

    def _beside(self, size: int, tokens: int) -> _Step:
        rows = self._config.batch_size
        return _Step(self._graphs["mixed", size], rows=rows, columns=self._few, tokens=tokens)

    def afterwards(self, watch: _Taken) -> dict[str, float]:
        """What steps take more than when they are repeated: a chunk after a pause, and a decode step after a chunk."""
        size = self._config.prefill_chunk_size
        chunk, decode = self._alone(size, self._tokens(size)[-1]), self._decode(self._rows[-1], self._few)
        run_chunk, run_decode = watch.run(chunk), watch.run(decode)
        woken, turned = list[float](), list[float]()
        for _ in range(PAUSES):
            time.sleep(PAUSE_S)
            woken.append(run_chunk())
            turned.append(run_decode())
        return {
            "woken": max(0.0, statistics.median(woken) - watch.median(chunk)),
            "turned": max(0.0, statistics.median(turned) - watch.median(decode)),
        }

    def times(self, watch: _Taken, host: Curve, copied_token: float, after: Mapping[str, float]) -> LiveTimes:
        """Of all steps, from those that were taken."""
        short, long = (
            [watch.median(self._decode(rows, seen)) for rows in self._rows] for seen in (self._few, self._many)
        )
        span = max(self._many - self._few, 1)
        slopes = [max(0.0, (b - a) / (rows * span)) for a, b, rows in zip(short, long, self._rows, strict=True)]
        base = [a - slope * rows * self._few for a, slope, rows in zip(short, slopes, self._rows, strict=True)]
        column = Curve(self._rows, tuple(slopes))
        return LiveTimes(
            decode=Curve(self._rows, tuple(base)),
            decode_column=column,
            chunks={size: self._chunk_times(watch, size, column) for size in self._config.chunk_sizes},
            host=host,
            copied_token=copied_token,
            ratios=watch.ratios(),
            **after,
        )

    def _chunk_times(self, watch: _Taken, size: int, decode_column: Curve) -> ChunkTimes:
        tokens, length, rows = self._tokens(size), self._config.sequence_length, self._config.batch_size
        alone = [watch.median(self._alone(size, count)) for count in tokens]
        behind = [watch.median(self._alone(size, count, start=length - count)) for count in tokens]
        silent = [watch.median(self._alone(size, count, outputs=False)) for count in tokens]
        column = [
            max(0.0, b - a) / (count * max(length - count, 1))
            for a, b, count in zip(alone, behind, tokens, strict=True)
        ]
        beside = None
        if self._config.mixed_step:
            seen = decode_column(rows) * (rows - 1) * self._few
            beside = Curve(tokens, tuple(watch.median(self._beside(size, count)) - seen for count in tokens))
        return ChunkTimes(
            alone=Curve(tokens, tuple(alone)),
            beside=beside,
            unread=Curve(tokens, tuple(max(0.0, a - b) for a, b in zip(alone, silent, strict=True))),
            column=Curve(tokens, tuple(column)),
        )


def _host(runner: TimedRunner, config: NeuronConfig, vocab_size: int) -> Curve:
    """What the engine takes of a step beside the runner, with one request and with as many as there are slots."""
    steps = min(_HOST_STEPS, config.sequence_length // 2)
    rows = sorted({1, config.batch_size})
    found = []
    for count in rows:
        rest = sorted(seconds for _ in range(_HOST_RUNS) for seconds in _beside(runner, count, steps, vocab_size))
        found.append(rest[len(rest) // 2])
    return Curve(tuple(rows), tuple(found))


def _beside(runner: TimedRunner, rows: int, steps: int, vocab_size: int) -> Iterator[float]:
    engine = Engine(runner, vocab_size=vocab_size)
    for number in range(rows):
        prompt = np.full(1, number % vocab_size, np.int32)
        engine.add_request(Request(request_id=str(number), prompt_token_ids=prompt, max_new_tokens=steps))
    while engine.has_work:
        runner.spent = 0.0
        taken = seconds_of(engine.step)
        if engine.scheduler.running == rows:
            yield taken - runner.spent
    runner.reset_all()


def _copied(runner: TimedRunner) -> float:
    """Seconds for each token of a prefix that is copied."""
    length = runner.config.sequence_length - 1
    if runner.config.batch_size == 1 or runner.kept.needed or not length:
        return 0.0
    times = []
    for _ in range(LEAST_RUNS):
        runner.lengths[0] = length
        times.append(seconds_of(lambda: runner.reuse(1, 0, length)))
    return statistics.median(times) / length


def _doubling(most: int) -> tuple[int, ...]:
    return (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most)
