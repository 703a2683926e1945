# SPDX-License-Identifier: Apache-2.0
"""Times of an engine's steps: prompts alone, then rows that decode together. What is run first of each is not counted."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...config import NeuronConfig
from ...engine.engine import Engine
from ...engine.policy import SchedulerOptions
from ...engine.request import Request
from ...engine.step import RequestFailure
from ...runtime.limits import check_fits
from ...runtime.runner import GraphRunner
from ...step.model_spec import ModelSpec


PROMPT_LENGTHS = (128, 512, 2048)
CONTEXT = 128


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        prompt_lengths: tokens of prompts that are taken in alone.
        rows: how many requests decode together.
        context_length: tokens before those that are decoded.
        new_tokens: that each of them gets, the first one from its prompt.
        repeat: measurements of each, beside one that is not counted.
    """

    prompt_lengths: tuple[int, ...]
    rows: tuple[int, ...]
    context_length: int
    new_tokens: int
    repeat: int

    @classmethod
    def of(
        cls,
        sizes: NeuronConfig,
        prompt_lengths: Sequence[int] | None,
        rows: Sequence[int] | None,
        context_length: int | None,
        new_tokens: int,
        repeat: int,
    ) -> Plan:
        """Of what was asked for; where nothing was, what the artifact's sizes hold.

        Raises:
            ValueError: it does not fit the artifact, or measures nothing.
        """
        least_values = (("new-tokens", new_tokens, 2), ("repeat", repeat, 1), ("context-length", context_length, 1))
        for name, value, least in least_values:
            if value is not None and value < least:
                raise ValueError(f"--{name} {value} must be at least {least}; raise it")
        most = max(1, sizes.sequence_length - new_tokens + 1)
        context = min(CONTEXT, most) if context_length is None else context_length
        if prompt_lengths is None:
            fitting = [length for length in PROMPT_LENGTHS if length <= sizes.sequence_length]
            prompt_lengths = fitting or [sizes.sequence_length]
        if rows is None:
            doubled = itertools.takewhile(lambda count: count < sizes.batch_size, (2**power for power in range(32)))
            rows = [count for count in (*doubled, sizes.batch_size) if _fits(count, context, new_tokens, sizes)]
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
        return cls(tuple(dict.fromkeys(prompt_lengths)), tuple(dict.fromkeys(rows)), context, new_tokens, repeat)


def _fits(rows: int, context: int, new_tokens: int, sizes: NeuronConfig) -> bool:
    """Whether the cache holds rows that nobody asked for; what one row cannot is told."""
    try:
        check_fits([range(context)] * rows, new_tokens, sizes)
    except ValueError:
        return rows == 1
    return True


@dataclass(frozen=True)
class Spread:
    """Of one number over the repetitions."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Prefill:
    """A prompt alone.

    Attributes:
        ttft_ms: from the request to its first token.
        tokens_per_second: of the prompt, over that time.
        padding_share: of the tokens that its graphs have room for, those that are none of its own.
    """

    prompt_tokens: int
    ttft_ms: Spread
    tokens_per_second: Spread
    padding_share: float


@dataclass(frozen=True)
class Decode:
    """Rows that decode together, all of them in every step.

    Attributes:
        context_tokens: that each has before the first of these steps.
        step_ms: the median step of each repetition.
        itl_p50_ms, itl_p99_ms: time between two tokens of a row, over the steps of all repetitions.
        tokens_per_second: of all rows together, at the median step.
        idle_share: of the decode rows of the graphs, those that run along empty.
    """

    rows: int
    context_tokens: int
    step_ms: Spread
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_second: float
    idle_share: float


class Bench:
    """Measures one artifact's graphs.

    Args:
        runner: which nobody else uses.
        advance: called behind each repetition, with what it was.
    """

    def __init__(self, runner: GraphRunner, model: ModelSpec, advance: Callable[[str], None]) -> None:
        # Prompts first: then all rows decode together from their first step to their last.
        options = SchedulerOptions(policy="prefill_first", prefix_reuse=False)
        self._engine = Engine(runner, options, vocab_size=model.vocab_size)
        self._random = np.random.default_rng(0)
        self._tokens = min(model.num_embeddings, model.vocab_size)
        self._numbers = itertools.count()
        self._advance = advance

    def prefill(self, length: int, repeat: int) -> Prefill:
        """Raises RuntimeError where a step fails."""
        counts, seconds = self._engine.statistics, []
        for number in range(repeat + 1):
            if number == 1:
                before = counts.prompt_tokens, counts.padded_prompt_tokens
            start = time.perf_counter()
            self._add(length, 1)
            while self._engine.has_work:
                self._step()
            seconds.append(time.perf_counter() - start)
            self._advance(f"a prompt of {length:,} tokens")
        computed, padding = counts.prompt_tokens - before[0], counts.padded_prompt_tokens - before[1]
        return Prefill(
            prompt_tokens=length,
            ttft_ms=Spread.of([each * 1000 for each in seconds[1:]]),
            tokens_per_second=Spread.of([length / each for each in seconds[1:]]),
            padding_share=padding / (computed + padding),
        )

    def decode(self, rows: int, context: int, new_tokens: int, repeat: int) -> Decode:
        """Raises RuntimeError where a step fails."""
        counts, runs = self._engine.statistics, []
        for number in range(repeat + 1):
            if number == 1:
                before = counts.decode_tokens, counts.idle_decode_rows
            for _ in range(rows):
                self._add(context, new_tokens)
            while self._engine.scheduler.running < rows:
                self._step()
            steps = []
            while self._engine.has_work:
                start = time.perf_counter()
                self._step()
                steps.append((time.perf_counter() - start) * 1000)
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

    def _add(self, length: int, new_tokens: int) -> None:
        prompt = self._random.integers(0, self._tokens, length)
        self._engine.add_request(
            Request(request_id=str(next(self._numbers)), prompt_token_ids=prompt, max_new_tokens=new_tokens)
        )

    def _step(self) -> None:
        for event in self._engine.step():
            if isinstance(event, RequestFailure):
                raise event.error
