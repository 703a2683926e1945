# SPDX-License-Identifier: Apache-2.0
"""What Prometheus reads of a server: vLLM's names and buckets (vllm/v1/metrics/loggers.py and buckets.py), under a prefix of our own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .gate import Gate
from .served_model import ServedModel
from .tracing import Times, between


PREFIX = "optimum_neuron:"
CONTENT_TYPE = CONTENT_TYPE_LATEST
# vLLM's buckets: seconds to a first token, between two tokens, and of a request's life; tokens of a step.
_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_NEXT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LIFE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP = (1, *(2**power for power in range(3, 15)))
_ENDINGS = ("stop", "length", "abort", "error")
_LABEL = "model_name"


class Metrics:
    """The metrics of one server. Used by the event loop's thread; the engine's counts are read when they are asked for."""

    def __init__(self, served: ServedModel, gate: Gate) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._name = served.name

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(PREFIX + name, text, [_LABEL], buckets=buckets, registry=self._registry)
            return made.labels(served.name)

        self._first = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST)
        self._next = histogram("inter_token_latency_seconds", "Between two tokens of a request.", _NEXT)
        self._mean = histogram(
            "request_time_per_output_token_seconds", "Of each request, the mean time to a further token.", _NEXT
        )
        self._whole = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", _LIFE)
        self._queue = histogram("request_queue_time_seconds", "From the queue to a slot.", _LIFE)
        self._prefill = histogram("request_prefill_time_seconds", "From a slot to the first token.", _LIFE)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.", _LIFE)
        self._inference = histogram("request_inference_time_seconds", "From a slot to the last token.", _LIFE)
        lengths = _lengths(served.config.sequence_length)
        self._prompt = histogram("request_prompt_tokens", "Of each request, tokens of its prompt.", lengths)
        self._generated = histogram("request_generation_tokens", "Of each request, tokens that it got.", lengths)
        prompts = Counter(PREFIX + "prompt_tokens", "Tokens of prompts taken in.", [_LABEL], registry=self._registry)
        self._prompt_tokens = prompts.labels(served.name)
        ended = Counter(
            PREFIX + "request_success",
            "Requests that ended: abort where the client went away, error where the server failed.",
            [_LABEL, "finished_reason"],
            registry=self._registry,
        )
        self._ended = {reason: ended.labels(served.name, reason) for reason in _ENDINGS}
        self._refused = Counter(
            PREFIX + "request_refused", "HTTP requests that were refused.", [_LABEL, "status"], registry=self._registry
        )
        self._registry.register(EngineCollector(served, gate))

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """A request got its first token."""
        self._first.observe(seconds)
        self._prompt_tokens.inc(prompt_tokens)

    def next_token(self, seconds: float) -> None:
        """A request got another token."""
        self._next.observe(seconds)

    def ended(self, reason: str, prompt_tokens: int, tokens: int, times: Times, now: float) -> None:
        """A request ended; a time of it that never began is not counted."""
        self._ended[reason].inc()
        self._prompt.observe(prompt_tokens)
        self._generated.observe(tokens)
        decode = between(times.first, times.last)
        for histogram, seconds in (
            (self._whole, now - times.arrived),
            (self._queue, between(times.queued, times.started)),
            (self._prefill, between(times.started, times.first)),
            (self._decode, decode),
            (self._inference, between(times.started, times.last)),
            (self._mean, decode / (tokens - 1) if decode is not None and tokens > 1 else None),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def refused(self, status: int) -> None:
        """An HTTP request got no answer."""
        self._refused.labels(self._name, str(status)).inc()

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class EngineCollector(Collector):
    """What the engine counts, read when somebody asks."""

    def __init__(self, served: ServedModel, gate: Gate) -> None:
        self._served, self._gate = served, gate

    def collect(self) -> Iterator[Metric]:
        engine, name = self._served.service.engine, self._served.name
        statistics, config = engine.statistics, self._served.config
        running = engine.scheduler.running + engine.scheduler.prefilling
        waiting = max(self._gate.live - running, 0)
        used = statistics.blocks_in_use / (config.batch_size if config.kv_block_size is None else config.kv_blocks)
        for gauge, text, value in (
            ("num_requests_running", "Requests that have a slot.", running),
            ("num_requests_waiting", "Requests that wait for a slot.", waiting),
            ("kv_cache_usage_perc", "Slots, or blocks, that requests have: 1 is all.", used),
            ("model_load_seconds", "From the start to a loaded model.", self._served.load_seconds),
        ):
            yield _family(GaugeMetricFamily, gauge, text, [_LABEL], [([name], value)])
        queried = statistics.prompt_tokens + statistics.prefix_hit_tokens
        for counter, text, value in (
            ("generation_tokens", "Tokens that requests got.", statistics.generated_tokens),
            ("prefix_cache_queries", "Tokens of prompts looked up in the cache.", queried),
            ("prefix_cache_hits", "Of these, tokens that were reused.", statistics.prefix_hit_tokens),
            ("num_preemptions", "How often a request gave its blocks back.", statistics.preemptions),
            ("engine_steps", "Steps, each a run of a graph.", statistics.steps),
        ):
            yield _family(CounterMetricFamily, counter, text, [_LABEL], [([name], value)])
        yield self._steps()
        yield from self._graphs()

    def _steps(self) -> Metric:
        counts = self._served.service.engine.statistics.step_tokens.copy()  # at once: a step may add one
        family = HistogramMetricFamily(PREFIX + "iteration_tokens_total", "Tokens of each step.", labels=[_LABEL])
        buckets = [
            (floatToGoString(most), sum(runs for tokens, runs in counts.items() if tokens <= most))
            for most in (*_STEP, math.inf)
        ]
        family.add_metric([self._served.name], buckets, sum(tokens * runs for tokens, runs in counts.items()))
        return family

    def _graphs(self) -> Iterator[Metric]:
        labels = [_LABEL, "graph"]
        uses = [
            ([self._served.name, graph], use) for graph, use in self._served.service.engine.statistics.graphs.items()
        ]
        for counter, text, field in (
            ("graph_runs", "Runs of each graph.", "runs"),
            ("graph_tokens", "Tokens of requests that they computed.", "tokens"),
            ("graph_padding_tokens", "Their room for tokens that stayed empty.", "padding"),
        ):
            yield _family(
                CounterMetricFamily, counter, text, labels, [(key, getattr(use, field)) for key, use in uses]
            )
        shares = [(key, use.padding / max(use.padding + use.tokens, 1)) for key, use in uses]
        text = "Of all its runs' tokens, the padding."
        yield _family(GaugeMetricFamily, "graph_padding_share", text, labels, shares)


def _lengths(most: int) -> list[int]:
    """Return 1, 2, 5, 10, ... up to a number of tokens."""
    return [
        each for power in range(len(str(most))) for each in (10**power, 2 * 10**power, 5 * 10**power) if each <= most
    ]


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: list[str],
    values: Sequence[tuple[list[str], float]],
) -> Metric:
    family = kind(PREFIX + name, text, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family
