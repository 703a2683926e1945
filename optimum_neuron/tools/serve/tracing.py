# SPDX-License-Identifier: Apache-2.0
"""Spans of requests for an OpenTelemetry collector: vLLM's names and attributes (vllm/tracing). Imports OpenTelemetry late."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from ...core import Request
    from .metrics import Times

# The variable that vLLM reads, with vLLM's default.
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
_LATENCIES = {
    "queue": "time_in_queue",
    "life": "e2e",
    "prefill": "time_in_model_prefill",
    "decode": "time_in_model_decode",
    "inference": "time_in_model_inference",
}
_LAST_SPANS = 5.0  # seconds for spans that wait when the server ends


def import_exporter() -> Callable[..., Any]:
    """Return OpenTelemetry's exporter of the protocol in the environment; raise ImportError or ValueError where there is none."""
    protocol = os.environ.get(PROTOCOL_VARIABLE, "grpc")
    if protocol not in _EXPORTERS:
        raise ValueError(f"{PROTOCOL_VARIABLE}={protocol} is no protocol; give {' or '.join(_EXPORTERS)}")
    try:
        exporter: Callable[..., Any] = importlib.import_module(_EXPORTERS[protocol]).OTLPSpanExporter
    except ImportError as error:
        raise ImportError(
            f"--otlp-traces-endpoint needs OpenTelemetry with {protocol} ({error}): pip install 'optimum-neuron-runtime[otlp]'"
        ) from error
    return partial(exporter, insecure=True) if protocol == "grpc" else exporter


class Tracing:
    """Spans of one server. A thread sends them in batches, and drops those that the collector does not take."""

    def __init__(self, endpoint: str, model: str) -> None:
        exporter = import_exporter()(endpoint=endpoint)
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        service = os.environ.get("OTEL_SERVICE_NAME", "optimum-neuron")
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("optimum_neuron.tools.serve")
        self._kind, self._failed = trace.SpanKind.SERVER, trace.Status(trace.StatusCode.ERROR)
        self._propagator, self._model = TraceContextTextMapPropagator(), model

    def add_span(
        self, headers: Mapping[str, str], request: Request, n: int, times: Times, tokens: int, reason: str
    ) -> None:
        """Make the span of a request that has just ended after so many tokens; `traceparent` of the headers names the one above it."""
        now, wall = time.perf_counter(), time.time_ns()
        attributes: dict[str, Any] = {
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.n": n,
            "gen_ai.request.max_tokens": request.max_new_tokens,
            "gen_ai.request.temperature": request.sampling.temperature,
            "gen_ai.request.top_p": request.sampling.top_p,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [reason],
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.completion_tokens": tokens,
        }
        for part, seconds in times.to_seconds(now).items():
            attributes[f"gen_ai.latency.{_LATENCIES[part]}"] = seconds
        if times.first is not None:
            attributes["gen_ai.latency.time_to_first_token"] = times.first - times.arrived
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(headers),
            kind=self._kind,
            start_time=wall - int((now - times.arrived) * 1e9),
            attributes=attributes,
        )
        if reason == "error":
            span.set_status(self._failed)
        span.end(wall)

    def close(self) -> None:
        """Send the last spans, and wait a few seconds at most for a collector that does not answer."""
        thread = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        thread.start()
        thread.join(_LAST_SPANS)
