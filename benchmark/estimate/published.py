# SPDX-License-Identifier: Apache-2.0
"""Published runs as what their steps had to do. Fits nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from transformers import AutoConfig

from optimum_neuron.targets.neuron.sdk.hardware import CHIPS
from optimum_neuron.targets.neuron.sdk.step_times import StepTimes
from optimum_neuron.tools.estimate.core_sizes import CoreSizes, core_sizes
from optimum_neuron.tools.estimate.model_sizes import ModelSizes, measure
from optimum_neuron.tools.estimate.step_speed import step_work

from .published_runs import MODELS, RUNS, PublishedRun


Setup = tuple[str, str, int]


@dataclass(frozen=True)
class Measurement:
    """One published time and the work behind it.

    Attributes:
        kind: "decode" for a step's time, "prefill" for the time to a first token.
        milliseconds: published.
        work: seconds at the chip's peaks of weights, cache, products and scores; layers and their doublings; requests. In the
            order of `coefficients`.
        share: weight in a fit, where each batch size of a model on a group of cores counts once, whatever its contexts.
        stranger: held out, and nothing of its setup is fitted.
    """

    run: PublishedRun
    kind: str
    milliseconds: float
    work: np.ndarray
    share: float
    stranger: bool

    @property
    def setup(self) -> Setup:
        """A model's sizes but for its vocabulary, on a group of cores."""
        return _setup(self.run)


def coefficients(times: StepTimes) -> np.ndarray:
    """What a unit of each kind of work takes: with `Measurement.work` a sum of seconds."""
    shares = (times.weights, times.cache, times.flops, times.scores)
    return np.array([*(1 / share for share in shares), times.layer_s, times.request_s])


def times_of(found: np.ndarray) -> StepTimes:
    """The inverse of `coefficients`."""
    weights, cache_, products, scores, layer, request = map(float, found)
    return StepTimes(
        weights=1 / weights, cache=1 / cache_, flops=1 / products, scores=1 / scores, layer_s=layer, request_s=request
    )


@cache
def measurements() -> tuple[Measurement, ...]:
    """Every published time."""
    fitted = {_setup(run) for run in RUNS if not run.held_out}
    alike = Counter((_group(run), kind) for run in RUNS for kind, _, _ in _steps(run))
    return tuple(
        Measurement(run, kind, milliseconds, work, 1 / alike[_group(run), kind], _setup(run) not in fitted)
        for run in RUNS
        for kind, milliseconds, work in _steps(run)
    )


def _steps(run: PublishedRun) -> Iterator[tuple[str, float, np.ndarray]]:
    yield "decode", run.decode_ms, _work(run, run.batch_size, 1, run.context_length)
    if run.first_token_ms is not None and run.prompt_tokens is not None:
        context = run.prompt_context or run.prompt_tokens
        work = run.chunks * _work(run, 1, run.prompt_tokens, context)
        work[-1] = 1
        yield "prefill", run.first_token_ms, work


def _work(run: PublishedRun, rows: int, length: int, context: int) -> np.ndarray:
    core = _core(run.model, run.tensor_parallel_size)
    work = step_work(core, rows, length, context, CHIPS[run.target], run.tensor_parallel_size)
    return np.array([work.weights, work.cache, work.products, work.scores, work.latencies, 0.0])


@cache
def _core(model: str, cores: int) -> CoreSizes:
    return core_sizes(_sizes(model), cores)


@cache
def _sizes(model: str) -> ModelSizes:
    return measure(AutoConfig.for_model(**MODELS[model]), model, "bfloat16", trust_remote_code=False)


def _group(run: PublishedRun) -> tuple[str, str, int, int]:
    return run.model, run.target, run.tensor_parallel_size, run.batch_size


def _setup(run: PublishedRun) -> Setup:
    sizes = {name: value for name, value in MODELS[run.model].items() if name not in ("vocab_size", "model_type")}
    sizes.pop("sliding_window", None)
    return json.dumps(sizes, sort_keys=True), run.target, run.tensor_parallel_size
