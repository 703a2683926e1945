# SPDX-License-Identifier: Apache-2.0
"""Metrics of a server for Prometheus: vLLM's names and buckets (vllm/v1/metrics/loggers.py and buckets.py), under our prefix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .gate import Gate
from .protocol import LoadedModel


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


@dataclass
class Times:
    """Moments of a request, by `time.perf_counter()`: its HTTP request came, the engine got it, it had a slot, tokens came."""

    arrived: float
    queued: float | None = None
    started: float | None = None
    first: float | None = None
    last: float | None = None

    def to_seconds(self, now: float) -> dict[str, float]:
        """Return how long each part of a request that ends now took, without the parts that it did not have."""
        parts = {
            "life": (self.arrived, now),
            "queue": (self.queued, self.started),
            "prefill": (self.started, self.first),
            "decode": (self.first, self.last),
            "inference": (self.started, self.last),
        }
        return {name: end - start for name, (start, end) in parts.items() if start is not None and end is not None}


# Of each request: vLLM's name, the help, and the buckets.
_HISTOGRAMS = {
    "first": ("time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST),
    "next": ("inter_token_latency_seconds", "Between two tokens of a request.", _NEXT),
    "mean": ("request_time_per_output_token_seconds", "Of each request, the mean time to a further token.", _NEXT),
    "life": ("e2e_request_latency_seconds", "From a request's arrival to its end.", _LIFE),
    "queue": ("request_queue_time_seconds", "From the queue to a slot.", _LIFE),
    "prefill": ("request_prefill_time_seconds", "From a slot to the first token.", _LIFE),
    "decode": ("request_decode_time_seconds", "From the first token to the last.", _LIFE),
    "inference": ("request_inference_time_seconds", "From a slot to the last token.", _LIFE),
    "prompt": ("request_prompt_tokens", "Of each request, tokens of its prompt.", None),
    "generated": ("request_generation_tokens", "Of each request, tokens that it got.", None),
}


class Metrics:
    """The metrics of one server. The event loop's thread uses them; the engine's counts are read at each request for them."""

    def __init__(self, served: LoadedModel, gate: Gate) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._name = served.name
        most = served.config.sequence_length
        powers = [10**power for power in range(len(str(most)))]
        lengths = [each * power for power in powers for each in (1, 2, 5) if each * power <= most]
        self._histograms = {
            key: Histogram(PREFIX + name, text, [_LABEL], buckets=buckets or lengths, registry=self._registry).labels(
                served.name
            )
            for key, (name, text, buckets) in _HISTOGRAMS.items()
        }
        self._prompt_tokens = self._make_counter("prompt_tokens", "Tokens of prompts taken in.").labels(served.name)
        text = "Requests that ended: abort where the client went away, error where the server failed."
        ended = self._make_counter("request_success", text, "finished_reason")
        self._ended = {reason: ended.labels(served.name, reason) for reason in _ENDINGS}
        self._refused = self._make_counter("request_refused", "HTTP requests that were refused.", "status")
        self._registry.register(EngineCollector(served, gate))

    def _make_counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, [_LABEL, *labels], registry=self._registry)

    def count_token(self, times: Times, now: float, prompt_tokens: int) -> None:
        """Count a token of a request; with the first one its prompt."""
        if times.last is not None:
            self._histograms["next"].observe(now - times.last)
        else:
            self._histograms["first"].observe(now - times.arrived)
            self._prompt_tokens.inc(prompt_tokens)

    def count_ended(self, reason: str, prompt_tokens: int, tokens: int, times: Times, now: float) -> None:
        """Count a request that ended, without times that never began."""
        self._ended[reason].inc()
        values = {"prompt": prompt_tokens, "generated": tokens, **times.to_seconds(now)}
        if tokens > 1 and "decode" in values:
            values["mean"] = values["decode"] / (tokens - 1)
        for key, value in values.items():
            self._histograms[key].observe(value)

    def count_refused(self, status: int) -> None:
        self._refused.labels(self._name, str(status)).inc()

    def to_text(self) -> bytes:
        return generate_latest(self._registry)


class EngineCollector(Collector):
    """The engine's counts, read at each request for them."""

    def __init__(self, served: LoadedModel, gate: Gate) -> None:
        self._served, self._gate = served, gate

    def collect(self) -> Iterator[Metric]:
        engine, config = self._served.service.engine, self._served.config
        statistics, queues = engine.statistics, engine.scheduler.queues
        running = len(queues.running) + len(queues.prefilling)
        waiting = max(self._gate.live - running, 0)
        used = statistics.blocks_in_use / (config.batch_size if config.kv_block_size is None else config.kv_blocks)
        queried = statistics.prompt_tokens + statistics.prefix_hit_tokens
        gauge, counter, model = GaugeMetricFamily, CounterMetricFamily, self._served.name
        for kind, name, text, value in (
            (gauge, "num_requests_running", "Requests that have a slot.", running),
            (gauge, "num_requests_waiting", "Requests that wait for a slot.", waiting),
            (gauge, "kv_cache_usage_perc", "Slots, or blocks, that requests have: 1 is all.", used),
            (gauge, "model_load_seconds", "From the start to a loaded model.", self._served.load_seconds),
            (counter, "generation_tokens", "Tokens that requests got.", statistics.generated_tokens),
            (counter, "prefix_cache_queries", "Tokens of prompts looked up in the cache.", queried),
            (counter, "prefix_cache_hits", "Of these, tokens that were reused.", statistics.prefix_hit_tokens),
            (counter, "num_preemptions", "How often a request gave its blocks back.", statistics.preemptions),
            (counter, "engine_steps", "Steps, each a run of a graph.", statistics.steps),
        ):
            family = kind(PREFIX + name, text, labels=[_LABEL])
            family.add_metric([model], value)
            yield family
        uses = dict(statistics.graphs)
        for name, text, member in (
            ("graph_runs", "Runs of each graph.", "runs"),
            ("graph_tokens", "Tokens of requests that they computed.", "tokens"),
            ("graph_padding_tokens", "Their empty room for tokens.", "padding"),
        ):
            family = counter(PREFIX + name, text, labels=[_LABEL, "graph"])
            for graph, use in uses.items():
                family.add_metric([model, graph], getattr(use, member))
            yield family
        counts = statistics.step_tokens.copy()  # at once: a step may add one
        steps = HistogramMetricFamily(PREFIX + "iteration_tokens_total", "Tokens of each step.", labels=[_LABEL])
        buckets = [
            (floatToGoString(most), sum(count for size, count in counts.items() if size <= most))
            for most in (*_STEP, math.inf)
        ]
        steps.add_metric([model], buckets, sum(size * count for size, count in counts.items()))
        yield steps
