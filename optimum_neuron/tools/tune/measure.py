# SPDX-License-Identifier: Apache-2.0
"""Times of an artifact's steps on this CPU: each graph with few and with all of its tokens, and the engine around them.

Contents of the cache do not matter to times, so slots are said to hold tokens that were never computed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ...artifact.artifact import Artifact
from ...core import PromptPiece, Request
from ...engine.engine import Engine
from ...runtime.step_tensors import DecodeRows
from ...runtime.timing import TimedRunner, measure_seconds
from ...step.spec import GraphSpec
from ...targets import Executable
from .simulate import ChunkCurves, CpuClock, Curve


# Rounds over all steps, and in each of them runs of a step: at least so many, and more while they are short.
ROUNDS, LEAST_RUNS, MOST_RUNS, ENOUGH_S = 3, 2, 8, 0.1
STAGES = ROUNDS + 1
# Steps after a pause, and seconds of it: as long as a server waits for the next request.
PAUSES, PAUSE_S = 12, 0.15
# Chunks of fewer tokens than the first are as slow as decode rows are; between two of these, times grow evenly.
_CHUNK_TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
# Decode steps from which the engine's own time is taken, and the runs of them.
_HOST_STEPS, _HOST_RUNS = 24, 3


class _TimedStep(NamedTuple):
    """A measured step: rows that see `columns`, and tokens of a prompt after `start` others, in the next slot."""

    graph: GraphSpec
    rows: int = 0
    columns: int = 0
    tokens: int = 0
    start: int = 0
    outputs: bool = True


class MeasuredSteps(NamedTuple):
    """The steps of an artifact. Its folder may be gone."""

    artifact: Artifact
    clock: CpuClock
    runs: int
    spread: float  # the middle half of a step's runs over their median, on average
    seconds_per_graph: float = 0.0  # of the export


def measure_steps(artifact: Artifact, executable: Executable, advance: Callable[[str], None]) -> MeasuredSteps:
    """Measure all graphs of the cpu target in `STAGES`; raise ValueError where the cache has blocks."""
    config = artifact.config
    if config.kv_block_size is not None:
        raise ValueError(
            f"{artifact.path} has a cache of blocks (kv_block_size={config.kv_block_size}), and steps of such are not measured; export with "
            f"slots"
        )
    runner = TimedRunner(executable, config, artifact.graphs, artifact.model)
    runner.warm_up()
    vocab_size = min(artifact.model.vocab_size, artifact.model.num_embeddings)
    timer = _StepTimer(runner, vocab_size)
    # What takes the cores for a while meets some of a step's runs, not all.
    for number in range(ROUNDS):
        for step in timer.planned_steps():
            timer.time_step(step)
        advance(f"round {number + 1} of {ROUNDS}")
    clock = timer.make_clock(_host_curve(runner, vocab_size), _copy_seconds(runner))
    advance("the engine")
    runner.reset_slots()
    halves = [np.subtract(*np.percentile(each, (75, 25))) / statistics.median(each) for each in timer.times.values()]
    return MeasuredSteps(artifact, clock, sum(map(len, timer.times.values())), float(np.mean(halves)))


class _StepTimer:
    """The seconds of each run of each of a runner's steps, and the clock that follows from them."""

    def __init__(self, runner: TimedRunner, vocab_size: int) -> None:
        config = self._config = runner.config
        self._runner, self._vocab_size = runner, vocab_size
        self.times: dict[_TimedStep, list[float]] = {}
        # Of the longest context: on a CPU, attention ends at each token's own place.
        self._graphs = {(graph.kind, graph.chunk_size): graph for graph in runner.family}
        most = config.batch_size
        self._rows = (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most)
        self._few, self._many = min(16, config.sequence_length // 4 or 1), config.sequence_length - 1

    def planned_steps(self) -> Iterator[_TimedStep]:
        for rows in self._rows:
            yield from (self._decode_step(rows, columns) for columns in (self._few, self._many))
        for size in self._config.chunk_sizes:
            for tokens in self._token_counts(size):
                yield self._chunk_step(size, tokens)
                yield self._chunk_step(size, tokens, start=self._config.sequence_length - tokens)
                yield self._chunk_step(size, tokens, outputs=False)
                if self._config.mixed_step:
                    yield self._mixed_step(size, tokens)

    def _token_counts(self, size: int) -> tuple[int, ...]:
        most = self._config.ctx_batch_size * size
        return (*(count for count in _CHUNK_TOKENS if count < most), most)

    def _decode_step(self, rows: int, columns: int) -> _TimedStep:
        return _TimedStep(self._graphs["token_generation", 0], rows=rows, columns=columns)

    def _chunk_step(self, size: int, tokens: int, *, start: int = 0, outputs: bool = True) -> _TimedStep:
        return _TimedStep(self._graphs["chunked_prefill", size], tokens=tokens, start=start, outputs=outputs)

    def _mixed_step(self, size: int, tokens: int) -> _TimedStep:
        rows = self._config.batch_size
        return _TimedStep(self._graphs["mixed", size], rows=rows, columns=self._few, tokens=tokens)

    def time_step(self, step: _TimedStep) -> None:
        run = self._step_call(step)
        run()  # the first one finds cold caches
        times: list[float] = []
        while len(times) < LEAST_RUNS or (len(times) < MOST_RUNS and sum(times) < ENOUGH_S):
            times.append(run())
        self.times.setdefault(step, []).extend(times)

    def _step_call(self, step: _TimedStep) -> Callable[[], float]:
        """Return a call that runs a step once, and returns its seconds."""
        runner, slots = self._runner, self._config.batch_size
        rows = min(step.rows, slots - 1) if step.tokens else step.rows
        decoding = np.arange(slots) < rows
        zeros = DecodeRows(
            np.zeros(slots, np.int32), decoding, np.zeros((slots, 4), np.float32), np.zeros(slots, np.float32)
        )
        chunks = [PromptPiece(rows, np.arange(step.tokens, dtype=np.int32) % self._vocab_size)] if step.tokens else []

        def run() -> float:
            runner.lengths[:] = np.where(decoding, step.columns - 1, 0)
            if step.tokens:
                runner.lengths[rows] = step.start
            return measure_seconds(
                lambda: runner.run_step(chunks, zeros if rows else None, step.graph, outputs=step.outputs)
            )

        return run

    def _medians(self, steps: Iterator[_TimedStep]) -> np.ndarray:
        return np.array([statistics.median(self.times[step]) for step in steps])

    def make_clock(self, host: Curve, copied_token: float) -> CpuClock:
        rows = np.array(self._rows)
        short, long = (
            self._medians(self._decode_step(count, seen) for count in self._rows) for seen in (self._few, self._many)
        )
        slopes = ((long - short) / (rows * max(self._many - self._few, 1))).clip(0)
        column = Curve(self._rows, slopes)
        woken, turned = self._time_changes()
        return CpuClock(
            decode=Curve(self._rows, short - slopes * rows * self._few),
            decode_column=column,
            chunks={size: self._chunk_curves(size, column) for size in self._config.chunk_sizes},
            host=host,
            copied_token=copied_token,
            ratios=tuple(spent / statistics.median(times) for times in self.times.values() for spent in times),
            woken=woken,
            turned=turned,
        )

    def _time_changes(self) -> tuple[float, float]:
        """Return the seconds that a chunk takes more after a pause, and a decode step after a chunk, than when repeated."""
        size = self._config.prefill_chunk_size
        steps = self._chunk_step(size, self._token_counts(size)[-1]), self._decode_step(self._rows[-1], self._few)
        run_chunk, run_decode = map(self._step_call, steps)
        woken, turned = list[float](), list[float]()
        for _ in range(PAUSES):
            time.sleep(PAUSE_S)
            woken.append(run_chunk())
            turned.append(run_decode())
        chunk, decode = self._medians(iter(steps)).tolist()
        return max(0.0, statistics.median(woken) - chunk), max(0.0, statistics.median(turned) - decode)

    def _chunk_curves(self, size: int, decode_column: Curve) -> ChunkCurves:
        tokens, length, rows = self._token_counts(size), self._config.sequence_length, self._config.batch_size
        counts = np.array(tokens)
        alone = self._medians(self._chunk_step(size, count) for count in tokens)
        after = self._medians(self._chunk_step(size, count, start=length - count) for count in tokens)
        silent = self._medians(self._chunk_step(size, count, outputs=False) for count in tokens)
        mixed = None
        if self._config.mixed_step:
            seen = decode_column(rows) * (rows - 1) * self._few
            mixed = Curve(tokens, self._medians(self._mixed_step(size, count) for count in tokens) - seen)
        return ChunkCurves(
            alone=Curve(tokens, alone),
            mixed=mixed,
            unread=Curve(tokens, (alone - silent).clip(0)),
            column=Curve(tokens, ((after - alone) / (counts * (length - counts).clip(1))).clip(0)),
        )


def _host_curve(runner: TimedRunner, vocab_size: int) -> Curve:
    """Return the engine's own seconds of a step, with one request and with as many as there are slots."""
    rows = sorted({1, runner.config.batch_size})
    runs = [
        [seconds for _ in range(_HOST_RUNS) for seconds in _engine_seconds(runner, count, vocab_size)]
        for count in rows
    ]
    return Curve(rows, [statistics.median_high(each) for each in runs])


def _engine_seconds(runner: TimedRunner, rows: int, vocab_size: int) -> Iterator[float]:
    engine, steps = Engine(runner, vocab_size=vocab_size), min(_HOST_STEPS, runner.config.sequence_length // 2)
    for number in range(rows):
        prompt = np.full(1, number % vocab_size, np.int32)
        engine.add_request(Request(request_id=str(number), prompt_token_ids=prompt, max_new_tokens=steps))
    while engine.has_work:
        runner.spent = 0.0
        taken = measure_seconds(engine.step)
        if len(engine.scheduler.queues.running) == rows:
            yield taken - runner.spent
    runner.reset_slots()


def _copy_seconds(runner: TimedRunner) -> float:
    """Return the seconds for each token of a prefix that is copied."""
    length = runner.config.sequence_length - 1
    if runner.config.batch_size == 1 or runner.kept.needed or not length:
        return 0.0
    times = [measure_seconds(lambda: runner.copy_block(0, 1, length)) for _ in range(LEAST_RUNS)]
    return statistics.median(times) / length
