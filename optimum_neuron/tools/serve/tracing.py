# SPDX-License-Identifier: Apache-2.0
"""Spans of requests for an OpenTelemetry collector, with the names and attributes of vLLM's (vllm/tracing), so that one dashboard
shows both servers. OpenTelemetry is imported where it is asked for."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...engine.request import Request


# As vLLM reads it; so is its default.
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
_NAME = "llm_request"
_LAST_SPANS = 5.0  # seconds for what was not sent when the server ends


@dataclass
class Times:
    """When what happened to a request of the engine, by `time.perf_counter()`; None: it did not.

    Attributes:
        arrived: its HTTP request came.
        queued: the engine got it.
        started: it had a slot, and its prompt began.
        first, last: its tokens came.
    """

    arrived: float
    queued: float | None = None
    started: float | None = None
    first: float | None = None
    last: float | None = None


class Tracing:
    """Makes spans, and sends them in a thread of its own, in batches; what a collector does not take is dropped.

    Args:
        endpoint: of the collector, as vLLM's `--otlp-traces-endpoint`.
        model: the name that requests use.

    Raises:
        ImportError: OpenTelemetry is not installed.
        ValueError: the environment names a protocol that is not known.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        protocol = os.environ.get(PROTOCOL_VARIABLE, "grpc")
        if protocol not in _EXPORTERS:
            raise ValueError(f"{PROTOCOL_VARIABLE}={protocol} is no protocol; give {' or '.join(_EXPORTERS)}")
        try:
            exporters = importlib.import_module(_EXPORTERS[protocol])
            trace = importlib.import_module("opentelemetry.trace")
            context = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
            resources = importlib.import_module("opentelemetry.sdk.resources")
            sdk = importlib.import_module("opentelemetry.sdk.trace")
            export = importlib.import_module("opentelemetry.sdk.trace.export")
        except ImportError as error:
            raise ImportError(
                f"--otlp-traces-endpoint needs OpenTelemetry with {protocol} ({error}): pip install 'optimum-neuron-runtime[otlp]'"
            ) from error
        exporter = exporters.OTLPSpanExporter(endpoint=endpoint, **({"insecure": True} if protocol == "grpc" else {}))
        resource = resources.Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "optimum-neuron")})
        self._provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("optimum_neuron.tools.serve")
        self._kind, self._failed = trace.SpanKind.SERVER, trace.Status(trace.StatusCode.ERROR)
        self._propagator = context.TraceContextTextMapPropagator()
        self._model = model

    def ended(
        self, headers: Mapping[str, str], request: Request, n: int, times: Times, tokens: int, reason: str
    ) -> None:
        """A request of the engine ended.

        Args:
            headers: of its HTTP request: `traceparent` names the span that it belongs to.
            n: choices of each prompt.
            tokens: how many it got.
            reason: why it ended: stop, length, abort or error.
        """
        now, wall = time.perf_counter(), time.time_ns()
        span = self._tracer.start_span(
            _NAME,
            context=self._propagator.extract(headers),
            kind=self._kind,
            start_time=wall - int((now - times.arrived) * 1e9),
            attributes={
                key: value
                for key, value in self._attributes(request, n, times, tokens, reason, now).items()
                if value is not None
            },
        )
        if reason == "error":
            span.set_status(self._failed)
        span.end(wall)

    def _attributes(
        self, request: Request, n: int, times: Times, tokens: int, reason: str, now: float
    ) -> dict[str, Any]:
        return {
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.n": n,
            "gen_ai.request.max_tokens": request.max_new_tokens,
            "gen_ai.request.temperature": request.sampling.temperature,
            "gen_ai.request.top_p": request.sampling.top_p,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [reason],
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.completion_tokens": tokens,
            "gen_ai.latency.time_in_queue": between(times.queued, times.started),
            "gen_ai.latency.time_to_first_token": between(times.arrived, times.first),
            "gen_ai.latency.e2e": now - times.arrived,
            "gen_ai.latency.time_in_model_prefill": between(times.started, times.first),
            "gen_ai.latency.time_in_model_decode": between(times.first, times.last),
            "gen_ai.latency.time_in_model_inference": between(times.started, times.last),
        }

    def close(self) -> None:
        """Sends what is left, and waits for a collector that does not answer no longer than a few seconds."""
        thread = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        thread.start()
        thread.join(_LAST_SPANS)


def between(start: float | None, end: float | None) -> float | None:
    """Return the seconds from one time to another; None where one of them never came."""
    return None if start is None or end is None else end - start
