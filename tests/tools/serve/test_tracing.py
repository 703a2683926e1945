# SPDX-License-Identifier: Apache-2.0
"""`--otlp-traces-endpoint` with a collector on the loopback, and without one."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from otlp_collector import Collector, read_attributes
from served_app import NAME, App, free_port

from optimum_neuron.tools.serve import tracing
from optimum_neuron.tools.serve.server import ServerOptions, load_app
from optimum_neuron.tools.serve.tracing import PROTOCOL_VARIABLE, Tracing


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LATENCIES = {
    "time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill", "time_in_model_decode", "time_in_model_inference"
}  # fmt: skip


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv(PROTOCOL_VARIABLE, "http/protobuf")
    collector = Collector()
    yield collector
    collector.close()


def test_each_request_of_the_engine_is_a_span_below_its_clients(artifact: Path, collector: Collector) -> None:
    options = ServerOptions(
        artifact=artifact, name=NAME, api_key=None, max_queue=8, drain_timeout=5, step_timeout=60, trust_remote_code=False,
        rank_python=None, rank_timeout=None, otlp_traces_endpoint=collector.endpoint,
    )  # fmt: skip
    begin = time.time_ns()
    body = {
        "model": NAME,
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.5,
        "ignore_eos": True,
    }
    with load_app(options) as loaded:
        app = App(loaded.app, loaded.served, loaded.gate, None)  # type: ignore[arg-type]
        answer = app.request("POST", "/v1/completions", body, traceparent=PARENT).json()
        app.complete([5, 6], max_tokens=1)
    end = time.time_ns()
    *both, last = sorted(collector.spans, key=lambda span: not span.parent_span_id)
    assert len(both) == 2 and all(
        span.name == "llm_request" and span.kind == span.SPAN_KIND_SERVER for span in collector.spans
    )
    for span in both:
        assert f"00-{span.trace_id.hex()}-{span.parent_span_id.hex()}-01" == PARENT
        assert begin <= span.start_time_unix_nano <= span.end_time_unix_nano <= end
        found = read_attributes(span)
        seconds = {key.removeprefix("gen_ai.latency."): found.pop(key) for key in list(found) if ".latency." in key}
        assert found.pop("gen_ai.request.id").startswith(answer["id"])
        assert found == {
            "gen_ai.request.n": 2,
            "gen_ai.request.max_tokens": 4,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.5,
            "gen_ai.response.model": NAME,
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.usage.prompt_tokens": 3,
            "gen_ai.usage.completion_tokens": 4,
        }
        assert seconds.keys() == LATENCIES and all(value >= 0 for value in seconds.values())
        assert seconds["time_in_queue"] + seconds["time_in_model_inference"] <= seconds["e2e"]
        assert seconds["time_in_queue"] <= seconds["time_to_first_token"]
    assert not last.parent_span_id and last.trace_id != both[0].trace_id


def test_requests_that_fail_are_spans_too(start: Callable[..., App], collector: Collector) -> None:
    traced = Tracing(collector.endpoint, NAME)
    app = start(tracing=traced)

    def broken() -> Any:
        raise RuntimeError("broken")

    app.service.engine.step = broken  # type: ignore[method-assign]
    assert app.complete("Hi").status_code == 503
    traced.close()
    (span,) = collector.spans
    assert (
        read_attributes(span)["gen_ai.response.finish_reasons"] == ["error"]
        and span.status.code == span.status.STATUS_CODE_ERROR
    )
    assert "gen_ai.latency.time_to_first_token" not in read_attributes(span)


def test_a_collector_that_is_not_there_costs_a_request_nothing(
    start: Callable[..., App], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROTOCOL_VARIABLE, "http/protobuf")
    monkeypatch.setattr(tracing, "_LAST_SPANS", 0.1)
    traced = Tracing(f"http://127.0.0.1:{free_port()}/v1/traces", NAME)
    assert start(tracing=traced).complete("Hi", max_tokens=2).status_code == 200
    begin = time.monotonic()
    traced.close()
    assert time.monotonic() - begin < 5


def test_a_missing_package_and_an_unknown_protocol_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'opentelemetry'")

    monkeypatch.setenv(PROTOCOL_VARIABLE, "carrier-pigeon")
    with pytest.raises(ValueError, match="carrier-pigeon is no protocol; give grpc or http/protobuf"):
        Tracing("http://127.0.0.1:1", NAME)
    monkeypatch.delenv(PROTOCOL_VARIABLE)
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"OpenTelemetry with grpc .*pip install 'optimum-neuron-runtime\[otlp\]'"):
        Tracing("http://127.0.0.1:1", NAME)
