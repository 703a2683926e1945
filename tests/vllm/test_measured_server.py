# SPDX-License-Identifier: Apache-2.0
"""vLLM as the benchmarks drive it: the engine in a process of its own, under users who keep it busy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmark.serving.vllm_server import VllmServer
from benchmark.serving.workloads import PromptSource, Users
from optimum_neuron.vllm.settings import ARTIFACT_VARIABLE


def test_requests_get_all_their_tokens_and_preemptions_are_counted(
    export_text: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ARTIFACT_VARIABLE, "")  # as it was, afterwards
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    artifact = export_text(sequence_length=256, kv_block_size=64, kv_cache_tokens=256)
    server = VllmServer("vLLM", artifact)
    try:
        users = Users(users=5, requests=12, prompt=40, new_tokens=60, tail=0.5, longest=200)
        jobs = users.jobs(PromptSource(server.vocab_size, 0))
        trace = server.serve(jobs)
    finally:
        server.close()
    assert {job.name: job.new_tokens for job in jobs} == {name: len(times) for name, times in trace.tokens.items()}
    assert trace.rows == 4 and trace.counters["preemptions"] > 0 and trace.counters["prefix_hit_tokens"] >= 0
    assert users.results(trace)["preempted"] == trace.counters["preemptions"]
