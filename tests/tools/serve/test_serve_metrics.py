# SPDX-License-Identifier: Apache-2.0
"""/metrics and --otlp-traces-endpoint: what Prometheus and a collector get is what happened."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from otlp_collector import Collector, read_attributes
from served_app import NAME, App, Start, free_port, server_options

from optimum_neuron.engine.engine import Engine
from optimum_neuron.tools.serve import tracing
from optimum_neuron.tools.serve.server import load_app
from optimum_neuron.tools.serve.tracing import PROTOCOL_VARIABLE, Tracing


PROMPT = "Zebras graze where nobody has ever been"


def test_tokens_hits_runs_and_times_are_counted(app: App) -> None:
    prompt = len(app.served.tokenizer(PROMPT)["input_ids"])
    for _ in range(2):
        assert app.complete(PROMPT, max_tokens=5, temperature=0, ignore_eos=True).status_code == 200
    assert app.metric("prompt_tokens_total") == 2 * prompt and app.metric("generation_tokens_total") == 10
    hits, queries = (app.metric(f"prefix_cache_{name}_total") for name in ("hits", "queries"))
    assert (hits, queries) == (prompt - 1, 2 * prompt)
    assert app.metric("time_to_first_token_seconds_count") == app.metric("e2e_request_latency_seconds_count") == 2
    assert app.metric("inter_token_latency_seconds_count") == 8
    assert app.metric("request_prompt_tokens_sum") == 2 * prompt and app.metric("request_generation_tokens_sum") == 10
    parts = ("queue", "prefill", "decode", "inference")
    spans = {name: app.metric(f"request_{name}_time_seconds_sum") for name in parts}
    assert all(seconds > 0 for seconds in spans.values())
    assert spans["inference"] == pytest.approx(spans["prefill"] + spans["decode"])
    assert app.metric("request_time_per_output_token_seconds_sum") == pytest.approx(spans["decode"] / 4)
    assert 0 < app.metric("inter_token_latency_seconds_sum") < app.metric("e2e_request_latency_seconds_sum")
    assert app.metric("request_success_total", finished_reason="length") == 2
    assert app.metric("model_load_seconds") == 1.5 and app.metric("num_preemptions_total") == 0
    uses = app.service.engine.statistics.graphs
    for name, use in uses.items():
        assert app.metric("graph_runs_total", graph=name) == use.runs
        tokens, padding = (app.metric(f"graph_{part}_total", graph=name) for part in ("tokens", "padding_tokens"))
        assert (tokens, padding) == (use.tokens, use.padding)
    assert sum(use.runs for use in uses.values()) == app.metric("engine_steps_total") > 0
    assert app.metric("iteration_tokens_total_count") == app.metric("engine_steps_total")
    assert app.metric("iteration_tokens_total_sum") == sum(use.tokens for use in uses.values())
    assert app.metric("iteration_tokens_total_bucket", le="1.0") == app.service.engine.statistics.step_tokens[1] > 0
    assert app.metric("request_prompt_tokens_bucket", le="50.0") == 2  # up to the model's length


def test_running_and_waiting_requests_are_told_apart(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    app, seen, real_step = start(), [], Engine.step
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

    def step(engine: Engine) -> list:
        events = real_step(engine)
        seen.append([app.metric(name) for name in names])
        return events

    monkeypatch.setattr(Engine, "step", step)
    assert app.complete([f"Number {number}" for number in range(5)], max_tokens=8, ignore_eos=True).status_code == 200
    assert max(running for running, _, _ in seen) == 3 and max(waiting for _, waiting, _ in seen) >= 2
    assert all(running + waiting <= 5 for running, waiting, _ in seen)
    assert max(share for _, _, share in seen) == 1.0
    seen.clear()
    assert app.complete("x" * 40, max_tokens=2).status_code == 200
    assert seen[0][0] == 1, "a prompt that is taken in only in part has a slot"


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
    begin = time.time_ns()
    sampled = {"max_tokens": 4, "n": 2, "temperature": 0.5, "top_p": 0.5, "ignore_eos": True}
    body = {"model": NAME, "prompt": [5, 6, 7], **sampled}
    with load_app(server_options(artifact, otlp_traces_endpoint=collector.endpoint)) as loaded:
        app = App(loaded.app, loaded.served, loaded.gate, None)  # type: ignore[arg-type]
        answer = app.request("POST", "/v1/completions", body, traceparent=PARENT).json()
        app.complete([5, 6], max_tokens=1)
    end = time.time_ns()
    *both, last = sorted(collector.spans, key=lambda span: not span.parent_span_id)
    assert len(both) == 2 and {(span.name, span.kind == span.SPAN_KIND_SERVER) for span in both} == {
        ("llm_request", True)
    }
    for span in both:
        assert f"00-{span.trace_id.hex()}-{span.parent_span_id.hex()}-01" == PARENT
        assert begin <= span.start_time_unix_nano <= span.end_time_unix_nano <= end
        found = read_attributes(span)
        seconds = {key.removeprefix("gen_ai.latency."): found.pop(key) for key in list(found) if ".latency." in key}
        assert found.pop("gen_ai.request.id").startswith(answer["id"])
        asked = {f"gen_ai.request.{name}": value for name, value in sampled.items() if name != "ignore_eos"}
        usage = {"gen_ai.usage.prompt_tokens": 3, "gen_ai.usage.completion_tokens": 4}
        answered = {"gen_ai.response.model": NAME, "gen_ai.response.finish_reasons": ["length"]}
        assert found == asked | usage | answered
        assert seconds.keys() == LATENCIES and all(value >= 0 for value in seconds.values())
        assert seconds["time_in_queue"] + seconds["time_in_model_inference"] <= seconds["e2e"]
        assert seconds["time_in_queue"] <= seconds["time_to_first_token"]
    assert not last.parent_span_id and last.trace_id != both[0].trace_id


def test_requests_that_fail_are_spans_too(start: Start, collector: Collector) -> None:
    traced = Tracing(collector.endpoint, NAME)
    app = start(tracing=traced)

    def broken() -> Any:
        raise RuntimeError("broken")

    app.service.engine.step = broken  # type: ignore[method-assign]
    assert app.complete("Hi").status_code == 503
    traced.close()
    (span,) = collector.spans
    found = read_attributes(span)
    assert found["gen_ai.response.finish_reasons"] == ["error"] and span.status.code == span.status.STATUS_CODE_ERROR
    assert "gen_ai.latency.time_to_first_token" not in found


def test_a_collector_that_is_not_there_costs_a_request_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
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
