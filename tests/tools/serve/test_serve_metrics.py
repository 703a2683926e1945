# SPDX-License-Identifier: Apache-2.0
"""/metrics: what Prometheus reads is what happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families
from served_app import NAME, App

from optimum_neuron.engine.engine import Engine


PROMPT = "Zebras graze where nobody has ever been"


def test_prometheus_reads_every_family_and_all_have_the_models_name(app: App) -> None:
    answer = app.request("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(answer.text))
    assert len(families) > 15
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels["model_name"] == NAME and sample.name.startswith("optimum_neuron:") for sample in samples)


def test_tokens_hits_runs_and_times_are_counted(app: App) -> None:
    prompt = len(app.served.tokenizer(PROMPT)["input_ids"])
    for _ in range(2):
        assert app.complete(PROMPT, max_tokens=5, temperature=0, ignore_eos=True).status_code == 200
    assert app.metric("prompt_tokens_total") == 2 * prompt and app.metric("generation_tokens_total") == 10
    assert (
        app.metric("prefix_cache_hits_total") == prompt - 1 and app.metric("prefix_cache_queries_total") == 2 * prompt
    )
    assert app.metric("time_to_first_token_seconds_count") == app.metric("e2e_request_latency_seconds_count") == 2
    assert app.metric("inter_token_latency_seconds_count") == 8
    assert app.metric("request_prompt_tokens_sum") == 2 * prompt and app.metric("request_generation_tokens_sum") == 10
    spans = {
        name: app.metric(f"request_{name}_time_seconds_sum") for name in ("queue", "prefill", "decode", "inference")
    }
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
        share = padding / (tokens + padding) if use.runs else 0
        assert app.metric("graph_padding_share", graph=name) == pytest.approx(share)
    assert sum(use.runs for use in uses.values()) == app.metric("engine_steps_total") > 0
    assert app.metric("iteration_tokens_total_count") == app.metric("engine_steps_total")
    assert app.metric("iteration_tokens_total_sum") == sum(use.tokens for use in uses.values())
    assert app.metric("iteration_tokens_total_bucket", le="1.0") == app.service.engine.statistics.step_tokens[1] > 0
    assert app.metric("request_prompt_tokens_bucket", le="50.0") == 2  # up to the model's length


def test_running_and_waiting_requests_are_told_apart(
    start: Callable[..., App], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, seen = start(), []
    real_step = Engine.step

    def step(engine: Engine) -> list:
        events = real_step(engine)
        seen.append(
            [app.metric(name) for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
        )
        return events

    monkeypatch.setattr(Engine, "step", step)
    assert app.complete([f"Number {number}" for number in range(5)], max_tokens=8, ignore_eos=True).status_code == 200
    assert max(running for running, _, _ in seen) == 3 and max(waiting for _, waiting, _ in seen) >= 2
    assert all(running + waiting <= 5 for running, waiting, _ in seen)
    assert max(share for _, _, share in seen) == 1.0
    seen.clear()
    assert app.complete("x" * 40, max_tokens=2).status_code == 200
    assert seen[0][0] == 1, "a prompt that is taken in only in part has a slot"
