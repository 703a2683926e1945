# SPDX-License-Identifier: Apache-2.0
"""With blocks, requests get the tokens that slots give them: where blocks run out, where prefixes are shared, sampled too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_requests import SAMPLED, serve, serve_alone
from helpers import VOCAB, artifact_runner, eager_runner, export_tiny, random_tokens, tiny_config
from invariants import check_cache
from torch import nn

from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.sampling.sampler import sample_by_sorting
from optimum_neuron.step.spec import SamplingParams
from optimum_neuron.targets.neuron.lowering.ops import NEURON_OPS


SLOTS = {"sequence_length": 256, "context_buckets": (256,), "prefill_chunk_size": 32}
BLOCKS = SLOTS | {"kv_block_size": 64, "kv_cache_tokens": 256}


@pytest.fixture(
    scope="module",
    params=[pytest.param("eager", marks=pytest.mark.full), "in place", pytest.param("cpu", marks=pytest.mark.slow)],
)
def both(
    request: pytest.FixtureRequest,
    tiny_models: dict[str, nn.Module],
    sharp_checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[GraphRunner, GraphRunner]:
    """Runners with slots, and with 4 blocks for 3 rows that could use 4 each."""
    model = tiny_models["llama"]
    if request.param == "in place":  # as devices have it, run by torch
        blocks = eager_runner(
            model,
            tiny_config(**BLOCKS | {"context_buckets": (128, 256), "target": "hlo"}),
            ops=replace(NEURON_OPS, sample=sample_by_sorting),
        )
        return eager_runner(model, tiny_config(**SLOTS)), blocks
    if request.param == "eager":
        return eager_runner(model, tiny_config(**SLOTS)), eager_runner(model, tiny_config(**BLOCKS))
    folder = tmp_path_factory.mktemp("blocks")
    checkpoint = sharp_checkpoints["llama"]
    sizes = {"slots": SLOTS, "blocks": BLOCKS}
    artifacts = [export_tiny(checkpoint, folder / name, **sizes[name], target="cpu") for name in sizes]
    return artifact_runner(artifacts[0]), artifact_runner(artifacts[1])


def crowd() -> list[Request]:
    """Three at a time need up to 6 blocks. Some start alike, by more than a block, and by less."""
    shared = random_tokens(100, seed=7)
    requests = []
    for number, (common, own, new) in enumerate(
        [(0, 60, 80), (0, 50, 90), (100, 5, 40), (100, 20, 30), (90, 8, 60), (0, 20, 100), (64, 1, 20), (100, 5, 25)]
    ):
        requests.append(
            Request(
                request_id=str(number),
                prompt_token_ids=[*shared[:common], *random_tokens(own, seed=number)],
                max_new_tokens=new,
                sampling=SAMPLED if number % 2 else SamplingParams(),
                seed=number,
            )
        )
    return requests


def serve_crowd(runner: GraphRunner, **options: bool) -> tuple[dict[str, list[int]], Engine]:
    runner.reset_slots()
    engine = Engine(runner, SchedulerOptions(**options), vocab_size=VOCAB)
    return serve(engine, crowd())[0], engine


@pytest.mark.parametrize("reuse", [True, pytest.param(False, marks=pytest.mark.full)])
def test_tokens_are_those_of_slots_also_where_requests_are_preempted(
    both: tuple[GraphRunner, GraphRunner], reuse: bool
) -> None:
    expected, engine = serve_crowd(both[0], prefix_reuse=False)
    assert engine.statistics.preemptions == 0
    tokens, engine = serve_crowd(both[1], prefix_reuse=reuse)
    assert tokens == expected
    counted = engine.statistics
    assert counted.preemptions >= 1 and counted.finished == len(tokens) and counted.blocks_in_use == 0
    assert counted.queue_seconds.count == counted.first_token_seconds.count == len(tokens)
    assert counted.generated_tokens == sum(map(len, tokens.values()))
    assert (counted.prefix_hit_tokens > 100) == reuse
    longest = max(len(each.prompt_token_ids) + (each.max_new_tokens or 0) for each in crowd())
    assert 0 < counted.recomputed_tokens <= counted.preemptions * longest


def test_aborts_and_failures_leave_no_block_behind(both: tuple[GraphRunner, GraphRunner]) -> None:
    engine = Engine(both[1], vocab_size=VOCAB)
    for request in crowd():
        engine.add_request(request)
    for step in range(60):
        engine.step()
        assert engine.statistics.blocks_in_use == engine.scheduler.cache.used_blocks
        if step % 15 == 14:
            engine.abort_request(next(iter(engine._samplers)))
        check_cache(engine.scheduler.cache)
    engine.abort_requests()
    assert not engine.abort_request("0")
    check_cache(engine.scheduler.cache)
    assert engine.scheduler.cache.used_blocks == 0 and not engine.has_work
    request = crowd()[0]
    assert serve(engine, [request])[0]["0"] == serve_alone(both[0], request)
