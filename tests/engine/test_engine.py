# SPDX-License-Identifier: Apache-2.0
"""The engine gives every request what it gets alone, whoever comes and goes beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import (
    CHUNK_SIZE,
    LENGTH,
    VOCAB,
    Opener,
    eager_runner,
    examples,
    fill_rows,
    generate,
    random_tokens,
    read_states,
    tiny_config,
)
from hypothesis import given
from hypothesis import strategies as st
from invariants import check_cache, held_tokens
from torch import nn
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.events import TokenEvent
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.spec import SamplingParams


POLICIES = ("mixed", "alternate", "prefill_first", "all_chunks")
SAMPLED = SamplingParams(top_k=40, top_p=0.95, temperature=1.5)
ALONE = SchedulerOptions(policy="prefill_first", prefix_reuse=False)
NO_DEVICE_SAMPLING = {"on_device_sampling": False}


def engine_over(runner: GraphRunner, options: SchedulerOptions | None = None, seed: int | None = None) -> Engine:
    return Engine(runner, options, vocab_size=VOCAB, seed=seed)


def finish(engine: Engine) -> dict[str, list[int]]:
    """Runs to the end; returns the tokens of each request."""
    tokens: dict[str, list[int]] = defaultdict(list)
    for event in engine.run_requests():
        tokens[event.request_id].append(event.token_id)
    return dict(tokens)


def alone(runner: GraphRunner, request: Request) -> list[int]:
    engine = engine_over(runner, ALONE)
    engine.add_request(request)
    return finish(engine)[request.request_id]


@dataclass
class Arrival:
    """A request, the step before which it arrives, and the steps after which it is aborted, if it is."""

    request: Request
    step: int
    aborted_after: int | None


@st.composite
def workloads(draw: st.DrawFn) -> list[Arrival]:
    """Prompts that often share a beginning, greedy and sampled, over slots that are too few for them."""
    arrivals = []
    for number in range(draw(st.integers(1, 8))):
        shared, own = draw(st.sampled_from([0, 0, 17, 25])), draw(st.integers(1, 24))
        sampled = draw(st.booleans())
        request = Request(
            request_id=str(number),
            prompt_token_ids=np.concatenate([random_tokens(shared, seed=7), random_tokens(own, seed=number)]),
            max_new_tokens=draw(st.integers(1, 14)),
            eos_token_ids=frozenset(draw(st.lists(st.integers(0, VOCAB - 1), max_size=20))),
            sampling=SAMPLED if sampled else SamplingParams(),
            seed=number,
            priority=draw(st.integers(0, 1)),
        )
        arrivals.append(
            Arrival(request, draw(st.integers(0, 12)), draw(st.one_of(st.none(), st.none(), st.integers(0, 9))))
        )
    return arrivals


def serve(engine: Engine, arrivals: Sequence[Arrival]) -> dict[str, list[int]]:
    """Runs a workload; checks the slot table at each step."""
    tokens: dict[str, list[int]] = {arrival.request.request_id: [] for arrival in arrivals}
    step = 0
    while engine.has_work or step <= max(arrival.step for arrival in arrivals):
        for arrival in arrivals:
            if arrival.step == step:
                engine.add_request(arrival.request)
            if arrival.aborted_after is not None and arrival.step + arrival.aborted_after == step:
                engine.abort_request(arrival.request.request_id)
        for event in engine.step():
            tokens[event.request_id].append(event.token_id)
        check_cache(engine.scheduler.cache)
        step += 1
        assert step < 2000
    return tokens


@pytest.mark.parametrize(
    ("name", "policy", "target"),
    [
        *(("llama", policy, "eager") for policy in POLICIES),
        ("lfm2", "mixed", "eager"),
        *(
            pytest.param(name, "mixed", "eager", marks=pytest.mark.full)
            for name in ("gpt_oss", "qwen3", "gemma2", "deepseek_v3")
        ),
        pytest.param("llama", "mixed", "cpu", marks=pytest.mark.slow),
    ],
)
def test_every_request_gets_what_it_gets_alone(open_runner: Opener, name: str, policy: str, target: str) -> None:
    runner = open_runner(name, target)

    @examples(12)
    @given(workloads())
    def check(arrivals: list[Arrival]) -> None:
        engine = engine_over(runner, SchedulerOptions(policy=policy))
        tokens = serve(engine, arrivals)
        counted = engine.statistics
        assert counted.finished + counted.aborted == len(arrivals)
        assert counted.generated_tokens == sum(map(len, tokens.values()))
        for arrival in arrivals:
            expected, got = alone(runner, arrival.request), tokens[arrival.request.request_id]
            assert got == expected[: len(got)]
            assert arrival.aborted_after is not None or len(got) == len(expected)

    check()


def test_a_prefix_hit_changes_no_bit(tiny_models: dict[str, nn.Module], tiny_specs: dict[str, ModelSpec]) -> None:
    runner = eager_runner(tiny_models["llama"], tiny_config(), deterministic=True)
    spec, prefix = tiny_specs["llama"], random_tokens(30)
    requests = [
        Request(request_id=str(own), prompt_token_ids=[*prefix, *random_tokens(own, seed=own)], max_new_tokens=6)
        for own in (3, 9, 20)
    ]

    def run(*, reuse: bool) -> tuple[dict[str, list[int]], int]:
        fill_rows(runner, spec, range(4), 0.0)
        engine = engine_over(runner, SchedulerOptions(prefix_reuse=reuse))
        tokens = {}
        for request in requests:  # one after another, so that each finds the one before
            engine.add_request(request)
            tokens |= finish(engine)
        engine.add_request(requests[0])
        while not engine.scheduler.queues.running:
            engine.step()
        # Copied from a slot that decodes.
        engine.add_request(Request(request_id="copy", prompt_token_ids=requests[0].prompt_token_ids, max_new_tokens=6))
        tokens |= finish(engine)
        return tokens | bits(engine), engine.statistics.prefix_hit_tokens

    def bits(engine: Engine) -> dict[str, list[int]]:
        """The keys of each prompt, wherever its slot is."""
        states = read_states(runner, spec)
        found = {}
        for slot in range(3):
            prompt = held_tokens(engine.scheduler.cache, slot)[:33]
            rows = [state[slot, :, : len(prompt)].flatten().view(torch.int32).tolist() for state in states.values()]
            found[f"slot of {prompt}"] = [value for row in rows for value in row]
        return found

    tokens, hits = run(reuse=True)
    expected, no_hits = run(reuse=False)
    assert tokens == expected and (hits, no_hits) == (30 + 30 + 32 + 32, 0)


def test_every_kind_of_step_runs_in_its_own_graph(open_runner: Opener) -> None:
    runner = open_runner("llama")
    runner.graph_calls.clear()
    engine = engine_over(runner)
    engine.add_request(Request(request_id="first", prompt_token_ids=random_tokens(4), max_new_tokens=8))
    engine.step()
    engine.step()
    engine.add_request(Request(request_id="second", prompt_token_ids=random_tokens(20), max_new_tokens=3))
    finish(engine)
    size, context = CHUNK_SIZE, f"context{LENGTH}"
    assert dict(runner.graph_calls) == {
        f"chunked_prefill_chunk{size}_{context}": 1,
        f"mixed_chunk{size}_{context}": 2,  # 20 tokens in 2 rows of 8 a step
        f"token_generation_{context}": 5,
    }
    counted = engine.statistics
    uses = counted.graphs
    assert {name: use.runs for name, use in uses.items()} == {
        g.name: runner.graph_calls[g.name] for g in runner.family
    }
    rooms = {graph.name: graph.tokens for graph in runner.family}
    assert all(use.tokens + use.padding == use.runs * rooms[name] for name, use in uses.items())
    assert sum(use.tokens for use in uses.values()) == 4 + 20 + 7 + 2
    assert (counted.steps, counted.prompt_tokens, counted.padded_prompt_tokens) == (8, 24, 3 * 16 - 24)
    assert (counted.decode_tokens, counted.idle_decode_rows) == (7 + 2, 7 * 3 - 9)
    assert counted.queue_seconds.count == counted.first_token_seconds.count == counted.finished == 2
    assert 0 < counted.queue_seconds.mean <= counted.first_token_seconds.largest


def test_unseeded_requests_draw_from_the_engines_seed(open_runner: Opener) -> None:
    runner = open_runner("llama")

    def run(seed: int | None) -> list[list[int]]:
        engine = engine_over(runner, seed=seed)
        for number in range(2):
            engine.add_request(
                Request(request_id=str(number), prompt_token_ids=[5, 6, 7], max_new_tokens=12, sampling=SAMPLED)
            )
        return list(finish(engine).values())

    first, second = run(1)
    assert first != second
    assert [first, second] == run(1) != run(2)
    assert run(None) != run(None)


def test_a_request_may_ask_for_the_most_likely_tokens_of_chunks_and_decodes(open_runner: Opener) -> None:
    runner = open_runner("llama", top_logprobs=3)
    prompt = random_tokens(11)
    wants = Request(request_id="wants", prompt_token_ids=prompt, max_new_tokens=5, logprobs=True)
    other = Request(request_id="other", prompt_token_ids=random_tokens(9), max_new_tokens=5)
    tokens, logits = generate(runner, prompt, 5)
    engine = engine_over(runner)
    engine.add_request(wants)
    engine.add_request(other)
    events = [event for event in engine.run_requests() if isinstance(event, TokenEvent)]
    assert all(event.top == () for event in events if event.request_id == "other")
    found = [event for event in events if event.request_id == "wants"]
    assert [event.token_id for event in found] == tokens
    for event, row in zip(found, logits.log_softmax(-1), strict=True):
        best = row.topk(3)
        assert [token for token, _ in event.top] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([each for _, each in event.top]), best.values, rtol=0, atol=1e-4)


def test_the_host_chooses_what_the_sampler_cannot(open_runner: Opener) -> None:
    prompt = random_tokens(9)
    greedy = alone(open_runner("llama"), Request(request_id="r", prompt_token_ids=prompt, max_new_tokens=10))
    on_host = open_runner("llama", **NO_DEVICE_SAMPLING)
    assert alone(on_host, Request(request_id="r", prompt_token_ids=prompt, max_new_tokens=10)) == greedy
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1e6)])
    penalized = Request(request_id="r", prompt_token_ids=prompt, max_new_tokens=10, processors=processors)
    tokens = alone(open_runner("llama"), penalized)
    assert len({*tokens, *prompt.tolist()}) == 10 + len(set(prompt.tolist()))
    for runner in (open_runner("llama"), on_host):
        wide = Request(
            request_id="r",
            prompt_token_ids=prompt,
            max_new_tokens=10,
            sampling=SamplingParams(top_k=VOCAB, temperature=2.0),
            seed=3,
        )
        engine = engine_over(runner)
        engine.add_request(wide)
        engine.add_request(
            Request(request_id="other", prompt_token_ids=prompt, max_new_tokens=5, sampling=SAMPLED, seed=4)
        )
        assert finish(engine)["r"] == alone(runner, wide)


REFUSED: list[tuple[dict, str]] = [
    ({"prompt_token_ids": []}, "has 0 tokens"),
    ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ({"max_new_tokens": 61}, "5 tokens and 61 new tokens do not fit sequence_length=64"),
    ({"sampling": SamplingParams(temperature=-1)}, r"temperature=-1, min_p=0.0; top_k must be"),
    ({"sampling": SamplingParams(top_p=2.0)}, r"top_p=2.0"),
    ({"sampling": SamplingParams(top_k=-1)}, "top_k=-1"),
    ({"sampling": SamplingParams(min_p=1.5)}, r"min_p=1.5; .* top_p and min_p between 0 and 1"),
    ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature=nan"),
    ({"sampling": SamplingParams(top_k=float("nan"))}, "top_k=nan"),
    ({"seed": -1}, "seed=-1; give a whole number of at least 0"),
    ({"processors": LogitsProcessorList()}, "logits processors, .* --output-logits"),
]


def test_what_can_never_be_served_is_refused_at_once(open_runner: Opener) -> None:
    engines = [engine_over(open_runner("llama", **config)) for config in ({"output_logits": False}, {})]
    for changes, words in REFUSED:
        engine = engines[0 if "processors" in changes else 1]
        refused = {"request_id": "r", "prompt_token_ids": random_tokens(5), "max_new_tokens": 3} | changes
        for ask in (engine.check_request, engine.add_request):
            with pytest.raises(ValueError, match=words):
                ask(Request(**refused))
        assert not engine.has_work and engine.step() == []
    engine.add_request(Request(request_id="r", prompt_token_ids=random_tokens(5), max_new_tokens=60))
    with pytest.raises(ValueError, match="request 'r' is not finished"):
        engine.add_request(Request(request_id="r", prompt_token_ids=random_tokens(5)))
    assert len(finish(engine)["r"]) == 60


def test_a_request_without_a_limit_fills_its_slot(open_runner: Opener) -> None:
    runner = open_runner("llama")
    engine = engine_over(runner)
    engine.add_request(Request(request_id="r", prompt_token_ids=random_tokens(5)))
    assert len(finish(engine)["r"]) == LENGTH - 5 + 1
    assert runner.lengths.max() == LENGTH


def test_abort_all_frees_every_slot_and_the_engine_goes_on(open_runner: Opener) -> None:
    engine = engine_over(open_runner("llama"))
    for number in range(5):
        engine.add_request(Request(request_id=str(number), prompt_token_ids=random_tokens(20), max_new_tokens=30))
    for _ in range(4):
        engine.step()
    engine.abort_requests()
    assert not engine.has_work and engine.statistics.aborted == 5
    assert not engine.abort_request("0")
    check_cache(engine.scheduler.cache)
    request = Request(request_id="0", prompt_token_ids=random_tokens(7), max_new_tokens=4)
    engine.add_request(request)
    assert finish(engine)["0"] == alone(open_runner("llama"), request)


def test_a_step_that_fails_ends_all_requests_and_voids_what_the_slots_held(
    open_runner: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_runner("llama")
    engine = engine_over(runner)
    long = Request(request_id="long", prompt_token_ids=random_tokens(40), max_new_tokens=6)
    engine.add_request(long)
    expected = finish(engine)["long"]

    def fails_after_the_run(*_: object) -> list[int]:
        raise RuntimeError("device lost")

    engine.add_request(Request(request_id="other", prompt_token_ids=random_tokens(40, seed=1), max_new_tokens=6))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "commit", fails_after_the_run)
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
    assert not engine.has_work and engine.statistics.aborted == 1
    assert not any(held_tokens(engine.scheduler.cache, slot) for slot in range(3))
    engine.add_request(long)
    assert finish(engine)["long"] == expected


@pytest.mark.parametrize("target", [1e-6, 1e9])
def test_the_pause_that_is_wanted_decides_the_chunk_size(tiny_models: dict[str, nn.Module], target: float) -> None:
    runner = eager_runner(tiny_models["llama"], tiny_config(prefill_chunk_buckets=(2, 4)))
    engine = engine_over(runner, SchedulerOptions(itl_target_ms=target))
    engine.add_request(Request(request_id="first", prompt_token_ids=random_tokens(4), max_new_tokens=30))
    engine.step()
    engine.add_request(Request(request_id="second", prompt_token_ids=random_tokens(40), max_new_tokens=3))
    finish(engine)
    mixed = {name: count for name, count in runner.graph_calls.items() if name.startswith("mixed")}
    if target < 1:
        assert mixed == {f"mixed_chunk2_context{LENGTH}": 10}
    else:
        assert mixed[f"mixed_chunk8_context{LENGTH}"] >= 2
