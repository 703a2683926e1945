# SPDX-License-Identifier: Apache-2.0
"""Times of an engine's steps: prompts alone, then rows that decode together. The first run of each is not counted."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ...config import NeuronConfig
from ...core import Request
from ...engine.engine import Engine
from ...engine.events import RequestFailure
from ...engine.policy import SchedulerOptions
from ...runtime.lengths import check_fits
from ...runtime.runner import GraphRunner
from ...runtime.timing import measure_seconds
from ...step.model_spec import ModelSpec


@dataclass(frozen=True)
class BenchPlan:
    """Measurements to make: prompts that run alone, and rows that decode together after a context, each of them repeated."""

    prompt_lengths: tuple[int, ...]
    rows: tuple[int, ...]
    context_length: int
    new_tokens: int
    repeat: int


def make_plan(
    sizes: NeuronConfig,
    prompt_lengths: Sequence[int] | None,
    rows: Sequence[int] | None,
    context_length: int | None,
    new_tokens: int,
    repeat: int,
) -> BenchPlan:
    """Return the plan for these options; None takes what the artifact's sizes hold. Raise ValueError where one does not fit."""
    for name, value, least in (
        ("new-tokens", new_tokens, 2),
        ("repeat", repeat, 1),
        ("context-length", context_length, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"--{name} {value} must be at least {least}; raise it")
    most = max(1, sizes.sequence_length - new_tokens + 1)
    context = min(128, most) if context_length is None else context_length
    if prompt_lengths is None:
        longest = sizes.sequence_length
        prompt_lengths = [each for each in (128, 512, 2048) if each <= longest] or [longest]
    if rows is None:
        doubled = [2**power for power in range(sizes.batch_size.bit_length()) if 2**power < sizes.batch_size]
        fitting = []
        for count in (*doubled, sizes.batch_size):
            with suppress(ValueError):
                check_fits([range(context)] * count, new_tokens, sizes)
                fitting.append(count)
        rows = fitting or [1]  # so that its refusal is seen
    for name, values in (("prompt-lengths", prompt_lengths), ("batch", rows)):
        if not values or min(values) < 1:
            raise ValueError(f"--{name} {' '.join(map(str, values))} must be whole numbers of at least 1")
    if max(rows) > sizes.batch_size:
        raise ValueError(
            f"--batch {max(rows)} rows are more than the batch_size={sizes.batch_size} that the artifact was exported with; lower it, "
            f"or export with --batch-size {max(rows)}"
        )
    for length in prompt_lengths:
        check_fits([range(length)], 1, sizes)
    for count in rows:
        check_fits([range(context)] * count, new_tokens, sizes)
    return BenchPlan(tuple(dict.fromkeys(prompt_lengths)), tuple(dict.fromkeys(rows)), context, new_tokens, repeat)


@dataclass(frozen=True)
class Spread:
    """Median, least and most of a number over the repetitions."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Prefill:
    """A prompt alone: time to its first token, its tokens over that time, and the padding of the graphs' tokens."""

    prompt_tokens: int
    ttft_ms: Spread
    tokens_per_second: Spread
    padding_share: float


@dataclass(frozen=True)
class Decode:
    """Rows that decode together, all of them in every step."""

    rows: int
    context_tokens: int  # of each row before the first of these steps
    step_ms: Spread  # of each repetition's median
    itl_p50_ms: float  # between two tokens of a row, over the steps of all repetitions
    itl_p99_ms: float
    tokens_per_second: float  # of all rows together, at the median step
    idle_share: float  # of the graphs' decode rows, those that hold no request


class Bench:
    """Measurements of one artifact's graphs, by a runner that nothing else uses; `advance` gets the name of each repetition."""

    def __init__(self, runner: GraphRunner, model: ModelSpec, advance: Callable[[str], None]) -> None:
        # Prompts first: then all rows decode together from their first step to their last.
        options = SchedulerOptions(policy="prefill_first", prefix_reuse=False)
        self._engine = Engine(runner, options, vocab_size=model.vocab_size)
        self._random = np.random.default_rng(0)
        self._tokens = min(model.num_embeddings, model.vocab_size)
        self._numbers = itertools.count()
        self._advance = advance

    def measure_prefill(self, length: int, repeat: int) -> Prefill:
        """Measure single prompts of one length; raise RuntimeError where a step fails."""
        counts, seconds = self._engine.statistics, []
        for number in range(repeat + 1):
            if number == 1:
                before = counts.prompt_tokens, counts.padded_prompt_tokens
            self._add_request(length, 1)
            seconds.append(measure_seconds(self._finish_requests))
            self._advance(f"a prompt of {length:,} tokens")
        computed, padding = counts.prompt_tokens - before[0], counts.padded_prompt_tokens - before[1]
        return Prefill(
            prompt_tokens=length,
            ttft_ms=Spread.of([each * 1000 for each in seconds[1:]]),
            tokens_per_second=Spread.of([length / each for each in seconds[1:]]),
            padding_share=padding / (computed + padding),
        )

    def measure_decode(self, rows: int, context: int, new_tokens: int, repeat: int) -> Decode:
        """Measure rows that decode together; raise RuntimeError where a step fails."""
        counts, runs = self._engine.statistics, []
        for number in range(repeat + 1):
            if number == 1:
                before = counts.decode_tokens, counts.idle_decode_rows
            for _ in range(rows):
                self._add_request(context, new_tokens)
            while len(self._engine.scheduler.queues.running) < rows:
                self._run_step()
            steps = []
            while self._engine.has_work:
                steps.append(measure_seconds(self._run_step) * 1000)
            runs.append(steps)
            self._advance(f"{rows} rows that decode")
        busy, idle = counts.decode_tokens - before[0], counts.idle_decode_rows - before[1]
        every = [step for steps in runs[1:] for step in steps]
        median = statistics.median(every)
        return Decode(
            rows=rows,
            context_tokens=context,
            step_ms=Spread.of([statistics.median(steps) for steps in runs[1:]]),
            itl_p50_ms=median,
            itl_p99_ms=float(np.percentile(every, 99)),
            tokens_per_second=rows * 1000 / median,
            idle_share=idle / (busy + idle),
        )

    def _finish_requests(self) -> None:
        while self._engine.has_work:
            self._run_step()

    def _add_request(self, length: int, new_tokens: int) -> None:
        prompt = self._random.integers(0, self._tokens, length)
        self._engine.add_request(
            Request(request_id=str(next(self._numbers)), prompt_token_ids=prompt, max_new_tokens=new_tokens)
        )

    def _run_step(self) -> None:
        for event in self._engine.step():
            if isinstance(event, RequestFailure):
                raise event.error
