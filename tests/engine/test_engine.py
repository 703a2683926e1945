# SPDX-License-Identifier: Apache-2.0
"""The engine gives every request what it gets alone, whoever comes and goes beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_requests import EVILS, SAMPLED, Arrival, evil_request, serve, serve_alone
from helpers import CHUNK_SIZE, LENGTH, VOCAB, Opener, eager_runner, examples, generate, random_tokens, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from invariants import held_tokens
from torch import nn
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.events import TokenEvent
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.spec import SamplingParams


POLICIES = ("mixed", "alternate", "prefill_first", "all_chunks")
NO_DEVICE_SAMPLING = {"on_device_sampling": False}


def engine_over(runner: GraphRunner, options: SchedulerOptions | None = None, seed: int | None = None) -> Engine:
    return Engine(runner, options, vocab_size=VOCAB, seed=seed)


@st.composite
def workloads(draw: st.DrawFn) -> list[Arrival]:
    """Prompts that often share a beginning, greedy and sampled, some of which fail, over slots that are too few for them."""
    arrivals = []
    for number in range(draw(st.integers(1, 8))):
        shared, own = draw(st.sampled_from([0, 0, 17, 25])), draw(st.integers(1, 24))
        prompt = np.concatenate([random_tokens(shared, seed=7), random_tokens(own, seed=number)])
        step = draw(st.integers(0, 12))
        if draw(st.integers(0, 4)) == 0:
            after = draw(st.integers(0, 5))
            kind, sampled = draw(st.sampled_from(sorted(EVILS))), draw(st.booleans())
            evil = evil_request(str(number), prompt, kind, after, do_sample=sampled)
            arrivals.append(Arrival(evil, step, fails_after=after))
            continue
        request = Request(
            request_id=str(number),
            prompt_token_ids=prompt,
            max_new_tokens=draw(st.integers(1, 14)),
            eos_token_ids=frozenset(draw(st.lists(st.integers(0, VOCAB - 1), max_size=20))),
            sampling=draw(st.sampled_from([SAMPLED, SamplingParams()])),
            seed=number,
            priority=draw(st.integers(0, 1)),
        )
        arrivals.append(Arrival(request, step, draw(st.one_of(st.none(), st.none(), st.integers(0, 9)))))
    return arrivals


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
        tokens, errors = serve(engine, arrivals)
        assert errors.keys() == {each.request.request_id for each in arrivals if each.fails_after is not None}
        counted = engine.statistics
        assert counted.finished + counted.aborted + counted.failed == len(arrivals)
        assert counted.generated_tokens == sum(map(len, tokens.values()))
        for arrival in arrivals:
            got = tokens[arrival.request.request_id]
            if arrival.fails_after is not None:
                assert len(got) == arrival.fails_after
                continue
            expected = serve_alone(runner, arrival.request)
            assert got == expected[: len(got)]
            assert arrival.aborted_after is not None or len(got) == len(expected)

    check()


def test_every_kind_of_step_runs_in_its_own_graph(open_runner: Opener) -> None:
    runner = open_runner("llama")
    runner.graph_calls.clear()
    engine = engine_over(runner)
    engine.add_request(Request(request_id="first", prompt_token_ids=random_tokens(4), max_new_tokens=8))
    engine.step()
    engine.step()
    serve(engine, [Request(request_id="second", prompt_token_ids=random_tokens(20), max_new_tokens=3)])
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
        how = {"prompt_token_ids": [5, 6, 7], "max_new_tokens": 12, "sampling": SAMPLED}
        return list(serve(engine, [Request(request_id=str(number), **how) for number in range(2)])[0].values())

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
    greedy = serve_alone(open_runner("llama"), Request(request_id="r", prompt_token_ids=prompt, max_new_tokens=10))
    on_host = open_runner("llama", **NO_DEVICE_SAMPLING)
    assert serve_alone(on_host, Request(request_id="r", prompt_token_ids=prompt, max_new_tokens=10)) == greedy
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1e6)])
    penalized = Request(request_id="r", prompt_token_ids=prompt, max_new_tokens=10, processors=processors)
    tokens = serve_alone(open_runner("llama"), penalized)
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
        other = Request(request_id="other", prompt_token_ids=prompt, max_new_tokens=5, sampling=SAMPLED, seed=4)
        assert serve(engine, [wide, other])[0]["r"] == serve_alone(runner, wide)


REFUSED: list[tuple[dict, str]] = [
    ({"prompt_token_ids": []}, "has 0 tokens"),
    ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ({"max_new_tokens": 61}, "5 tokens and 61 new tokens do not fit sequence_length=64"),
    ({"sampling": SamplingParams(temperature=-1)}, r"temperature=-1, min_p=0.0; top_k must be"),
    ({"sampling": SamplingParams(top_p=2.0)}, r"top_p=2.0"),
    ({"sampling": SamplingParams(top_k=-1)}, "top_k=-1"),
    ({"sampling": SamplingParams(min_p=1.5)}, r"min_p=1.5; .* top_p and min_p between 0 and 1"),
    ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature=nan"),
    *(
        ({"sampling": SamplingParams(top_k=5, temperature=value)}, r"temperature 0 or between 1.18e-38 and 3.4e\+38")
        for value in (1e-300, 1e-39, 1e39, 1e300, float("inf"), -0.1)
    ),
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
    assert len(serve(engine)[0]["r"]) == 60


def test_a_request_without_a_limit_fills_its_slot(open_runner: Opener) -> None:
    runner = open_runner("llama")
    engine = engine_over(runner)
    tokens, _ = serve(engine, [Request(request_id="r", prompt_token_ids=random_tokens(5))])
    assert len(tokens["r"]) == LENGTH - 5 + 1
    assert runner.lengths.max() == LENGTH


def test_a_step_that_fails_ends_all_requests_and_voids_what_the_slots_held(
    open_runner: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_runner("llama")
    engine = engine_over(runner)
    long = Request(request_id="long", prompt_token_ids=random_tokens(40), max_new_tokens=6)
    expected = serve(engine, [long])[0]["long"]

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
    assert serve(engine, [long])[0]["long"] == expected


@pytest.mark.parametrize("target", [1e-6, 1e9])
def test_the_pause_that_is_wanted_decides_the_chunk_size(tiny_models: dict[str, nn.Module], target: float) -> None:
    runner = eager_runner(tiny_models["llama"], tiny_config(prefill_chunk_buckets=(2, 4)))
    engine = engine_over(runner, SchedulerOptions(itl_target_ms=target))
    engine.add_request(Request(request_id="first", prompt_token_ids=random_tokens(4), max_new_tokens=30))
    engine.step()
    serve(engine, [Request(request_id="second", prompt_token_ids=random_tokens(40), max_new_tokens=3)])
    mixed = {name: count for name, count in runner.graph_calls.items() if name.startswith("mixed")}
    if target < 1:
        assert mixed == {f"mixed_chunk2_context{LENGTH}": 10}
    else:
        assert mixed[f"mixed_chunk8_context{LENGTH}"] >= 2
