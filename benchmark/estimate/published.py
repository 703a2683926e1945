# SPDX-License-Identifier: Apache-2.0
"""Step times that others measured on Neuron devices, by published_runs.csv, and what their steps had to do. Fits nothing.

All in bfloat16. Left out of the same pages: runs with weights in int8, which no graph of this project has; runs with
speculation; times to the first token of several prompts at once, since no page tells whether they shared a graph; mixtures
of experts, whose graphs read other experts than this project's; and models that a page does not name.

Of AWS' tables a decode step's columns are those of the graph of the median token: the power of two, up to the sequence length, which
holds the prompt and half of the answer. Llama-3.3-70B has the sizes of Llama-3-70B. One page does not tell Qwen3-32B's sequence length
on 4 cores: 4096 is the default, and at 2 rows the cache is 3% of what a step reads.

Which runs are held out of the fit was settled before any error was computed: fitted are the oldest family of AWS' tables,
Llama-2, and what optimum-neuron published; all other models and software are held out.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from optimum_neuron.targets.neuron.sdk.hardware import CHIPS
from optimum_neuron.targets.neuron.sdk.step_times import StepConstants
from optimum_neuron.tools.estimate.core_sizes import CoreSizes, core_sizes
from optimum_neuron.tools.estimate.model_sizes import ModelSizes, measure_model
from optimum_neuron.tools.estimate.step_speed import step_work


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One measured configuration of fixed-shape graphs.

    Attributes:
        context_length: columns of the cache that the decode step reads: the graph of the median token.
        decode_ms: a token generation step of all `batch_size` rows.
        prompt_tokens: that a graph which takes in a prompt computes, padding included; None where none was published.
        first_token_ms: from a request of one prompt to its first token, by `chunks` runs of that graph, with what the host does.
        prompt_context: columns that the prompt's tokens attend to.
        held_out: whether the fit never saw it.
    """

    model: str
    target: str
    tensor_parallel_size: int
    batch_size: int
    context_length: int
    decode_ms: float
    prompt_tokens: int | None
    first_token_ms: float | None
    prompt_context: int | None
    chunks: int
    held_out: bool
    source: str


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_ALIKE = {"head_dim": 128, "max_position_embeddings": 131_072, "tie_word_embeddings": False}


def _llama(*sizes: int, kind: str = "llama") -> dict[str, Any]:
    return {"model_type": kind, **dict(zip(_SIZES, sizes, strict=True)), **_ALIKE}


# Of their configs, what decides sizes.
MODELS = {
    "Llama-2-7B": _llama(4096, 11_008, 32, 32, 32, 32_000),
    "Llama-2-13B": _llama(5120, 13_824, 40, 40, 40, 32_000),
    "Llama-2-70B": _llama(8192, 28_672, 80, 64, 8, 32_000),
    "CodeLlama-13B": _llama(5120, 13_824, 40, 40, 40, 32_016),
    "Mistral-7B": _llama(4096, 14_336, 32, 32, 8, 32_000, kind="mistral") | {"sliding_window": None},
    "Llama-3-70B": _llama(8192, 28_672, 80, 64, 8, 128_256),
    "Llama-3.1-8B": _llama(4096, 14_336, 32, 32, 8, 128_256),
    "Llama-3.1-405B": _llama(16_384, 53_248, 126, 128, 8, 128_256),
    "Qwen3-32B": _llama(5120, 25_600, 64, 64, 8, 151_936, kind="qwen3"),
}


def _read(path: Path) -> Iterator[PublishedRun]:
    """Read the table; a cell without a value was not published."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            values: dict[str, Any] = {
                name: cell if name in _TEXTS else json.loads(cell) if cell else None for name, cell in row.items()
            }
            yield PublishedRun(**values)


_TEXTS = ("model", "target", "source")
RUNS = tuple(_read(Path(__file__).with_name("published_runs.csv")))
# Pull request 1086, configuration D: the two chunks of a 1500-token prompt.
LLAMA_8B_INF2 = next(run for run in RUNS if run.source.endswith("chunked-prefill, configuration D"))


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


def coefficients(times: StepConstants) -> np.ndarray:
    """What a unit of each kind of work takes: with `Measurement.work` a sum of seconds."""
    shares = (times.weights, times.cache, times.flops, times.scores)
    return np.array([*(1 / share for share in shares), times.layer_s, times.request_s])


def times_of(found: np.ndarray) -> StepConstants:
    """The inverse of `coefficients`."""
    weights, cache_, products, scores, layer, request = map(float, found)
    return StepConstants(
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
    return measure_model(AutoConfig.for_model(**MODELS[model]), model, "bfloat16", trust_remote_code=False)


def _group(run: PublishedRun) -> tuple[str, str, int, int]:
    return run.model, run.target, run.tensor_parallel_size, run.batch_size


def _setup(run: PublishedRun) -> Setup:
    sizes = {name: value for name, value in MODELS[run.model].items() if name not in ("vocab_size", "model_type")}
    sizes.pop("sliding_window", None)
    return json.dumps(sizes, sort_keys=True), run.target, run.tensor_parallel_size
