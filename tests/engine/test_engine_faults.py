# SPDX-License-Identifier: Apache-2.0
"""A request that fails by itself ends alone: all others get what they get without it, and its slot serves the next."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LENGTH, VOCAB, Opener, examples, random_tokens
from hypothesis import given
from hypothesis import strategies as st
from invariants import check_cache
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.events import RequestFailedError, RequestFailure
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.spec import SamplingParams


SAMPLED = SamplingParams(top_k=40, top_p=0.95, temperature=1.5)
WIDE_SAMPLED = SamplingParams(temperature=1.5)
POLICIES = ("mixed", "alternate")


def raises(scores: Tensor) -> Tensor:
    raise ZeroDivisionError("evil")


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raises_what_cannot_be_told(scores: Tensor) -> Tensor:
    raise UnspeakableError


def out_of_range(scores: Tensor) -> Tensor:
    scores[:, VOCAB + 7] = 0.0
    return scores


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda scores: torch.full_like(scores, value)


def one_nan(scores: Tensor) -> Tensor:
    return scores.index_fill(1, torch.tensor([5]), float("nan"))


# What a processor does to its scores, and what the request's error says.
EVILS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "raises": (raises, "ZeroDivisionError: evil"),
    "raises what has no words": (raises_what_cannot_be_told, "UnspeakableError"),
    "forces a token that does not exist": (out_of_range, "IndexError"),
    "leaves no token": (filled(-torch.inf), "-inf as the best"),
    "makes all scores NaN": (filled(torch.nan), "nan as the best"),
    "makes one score NaN": (one_nan, "nan as the best"),
    "returns more tokens than there are": (lambda scores: torch.cat([scores, scores + 50], 1), r"returned \[1, 600\]"),
    "returns two rows": (lambda scores: scores.repeat(2, 1), r"returned \[2, 300\]"),
    "returns one dimension": (lambda scores: scores[0], r"returned \[300\]"),
    "returns nothing": (lambda scores: None, "returned NoneType"),
    "returns no scores": (lambda scores: scores[:, :0], r"returned \[1, 0\]"),
    "is no function": (None, "TypeError"),  # type: ignore[dict-item]
}


@dataclass
class Turns:
    """A processor that turns evil with the n-th token."""

    evil: Callable[[Tensor], Any] | None
    after: int
    calls: int = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self.calls += 1
        return scores if self.calls <= self.after else self.evil(scores)  # type: ignore[misc]


def evil_request(name: str, prompt: np.ndarray, kind: str, after: int = 0, *, do_sample: bool = False) -> Request:
    processors = LogitsProcessorList([Turns(EVILS[kind][0], after)])
    return Request(
        request_id=name, prompt_token_ids=prompt, max_new_tokens=12, processors=processors, do_sample=do_sample, seed=1
    )


def plain(number: int, length: int, new_tokens: int = 9) -> Request:
    """Greedy, sampled by the graphs, sampled by the host, by processors: in turn."""
    how: list[dict[str, Any]] = [
        {},
        {"sampling": SAMPLED},
        {"sampling": WIDE_SAMPLED},
        {"processors": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])},
    ]
    prompt = np.concatenate([random_tokens(17, seed=7), random_tokens(length, seed=number)])
    return Request(
        request_id=str(number), prompt_token_ids=prompt, max_new_tokens=new_tokens, seed=number, **how[number % 4]
    )


def serve(engine: Engine) -> tuple[dict[str, list[int]], dict[str, RequestFailedError]]:
    """Runs to the end: the tokens of each request, and the errors of those that failed."""
    tokens: dict[str, list[int]] = {}
    errors: dict[str, RequestFailedError] = {}
    for event in engine.run_requests():
        assert event.request_id not in errors
        if isinstance(event, RequestFailure):
            errors[event.request_id] = event.error
        else:
            tokens.setdefault(event.request_id, []).append(event.token_id)
        check_cache(engine.scheduler.cache)
    assert len(engine.scheduler.cache.free_rows) == engine.config.batch_size
    return tokens, errors


def alone(runner: GraphRunner, request: Request) -> list[int]:
    engine = Engine(runner, SchedulerOptions(policy="prefill_first", prefix_reuse=False), vocab_size=VOCAB)
    engine.add_request(request)
    return serve(engine)[0][request.request_id]


@pytest.mark.parametrize("after", [0, 3])
def test_requests_with_tokens_that_cannot_be_chosen_end_alone(open_runner: Opener, after: int) -> None:
    runner = open_runner("llama")
    others = [plain(number, length) for number, length in enumerate((3, 12, 7, 20))]
    expected = {request.request_id: alone(runner, request) for request in others}
    engine = Engine(runner, vocab_size=VOCAB)
    shared = others[1].prompt_token_ids
    for request in (*others[:2], *(evil_request(kind, shared, kind, after) for kind in EVILS), *others[2:]):
        engine.add_request(request)
    tokens, errors = serve(engine)
    assert {name: tokens[name] for name in expected} == expected
    assert errors.keys() == EVILS.keys()
    for kind, error in errors.items():
        assert len(tokens.get(kind, ())) == after
        assert re.search(f"request '{kind}' failed: .*{EVILS[kind][1]}", str(error))
        assert isinstance(error.__cause__, Exception)
    counted = engine.statistics
    assert (counted.finished, counted.aborted, counted.failed) == (4, 0, len(EVILS))
    assert counted.first_token_seconds.count == 4 + len(EVILS) * bool(after)
    # Whatever its slot is taken to hold is right: prompts that start as it did get what they get alone.
    again = Request(request_id="again", prompt_token_ids=shared, max_new_tokens=9)
    engine.add_request(again)
    assert serve(engine)[0]["again"] == alone(runner, again)


def test_scores_that_cannot_be_drawn_from_end_their_request_alone(open_runner: Opener) -> None:
    """Temperatures that are next to nothing leave infinity."""
    runner = open_runner("llama", on_device_sampling=False)
    others = [plain(number, 5) for number in range(3)]
    expected = {request.request_id: alone(runner, request) for request in others}
    engine = Engine(runner, vocab_size=VOCAB)
    for value in (torch.inf, -torch.inf, torch.nan):
        processors = LogitsProcessorList([Turns(filled(value), 2)])
        prompt = random_tokens(5)
        engine.add_request(
            Request(request_id=str(value), prompt_token_ids=prompt, processors=processors, do_sample=True)
        )
    for request in others:
        engine.add_request(request)
    tokens, errors = serve(engine)
    assert {name: tokens.pop(name) for name in expected} == expected
    assert len(errors) == 3 and all(len(each) == 2 for each in tokens.values())
    assert all("RuntimeError: probability tensor" in str(error) for error in errors.values())


@pytest.mark.parametrize("on_device", [True, False])
def test_extreme_values_that_can_be_honoured_are(open_runner: Opener, on_device: bool) -> None:
    """The best token alone remains below a tiny top_p; a huge top_k leaves all tokens; greedy search has neither."""
    runner = open_runner("llama") if on_device else open_runner("llama", on_device_sampling=False)
    prompt = random_tokens(9)

    def tokens(**sampling: float) -> list[int]:
        request = Request(
            request_id="r",
            prompt_token_ids=prompt,
            max_new_tokens=8,
            sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
            seed=5,
        )
        return alone(runner, request)

    greedy = tokens()
    assert tokens(top_p=1e-300, temperature=1.0, top_k=40) == greedy
    assert tokens(top_p=0.0, temperature=1.0, top_k=40) == greedy
    assert tokens(top_k=10**400) == tokens(top_k=10**400, top_p=1e-300) == greedy
    assert tokens(top_k=10**400, temperature=2.0) == tokens(top_k=VOCAB, temperature=2.0)
    assert len(set(tokens(temperature=3e38, top_k=200))) > 4


def test_a_temperature_that_is_none_in_float32_is_refused(open_runner: Opener) -> None:
    engine = Engine(open_runner("llama"), vocab_size=VOCAB)
    for temperature in (1e-300, 1e-39, 1e39, 1e300, float("inf"), -0.1):
        sampling = SamplingParams(top_k=5, temperature=temperature)
        with pytest.raises(ValueError, match=r"temperature 0 or between 1.18e-38 and 3.4e\+38"):
            engine.add_request(Request(request_id="r", prompt_token_ids=[5, 6], sampling=sampling))
        assert not engine.has_work


def test_an_interrupt_in_the_main_thread_is_no_fault_of_a_request(open_runner: Opener) -> None:
    """Ctrl-C, or a handler that exits, comes in the midst of anything."""

    def interrupted(scores: Tensor) -> Tensor:
        raise KeyboardInterrupt

    engine = Engine(open_runner("llama"), vocab_size=VOCAB)
    processors = LogitsProcessorList([Turns(interrupted, 0)])
    engine.add_request(Request(request_id="a", prompt_token_ids=[5, 6], processors=processors))
    engine.add_request(Request(request_id="b", prompt_token_ids=[5, 6]))
    with pytest.raises(KeyboardInterrupt):
        serve(engine)
    assert not engine.has_work and engine.statistics.aborted == 2


@pytest.mark.parametrize(
    ("victims", "fails"),
    [(("a",), True), (("b",), False), (("c",), False), (("a", "c"), True), (("b", "a", "c"), True)],
)
def test_a_processor_may_abort_requests_its_own_included(
    open_runner: Opener, victims: tuple[str, ...], fails: bool
) -> None:
    runner = open_runner("llama")
    engine = Engine(runner, vocab_size=VOCAB)

    def ends(scores: Tensor) -> Tensor:
        for name in victims:
            engine.abort_request(name)
        if fails:
            raise ZeroDivisionError
        return scores

    quiet = LogitsProcessorList()
    requests = {
        name: Request(
            request_id=name, prompt_token_ids=random_tokens(5, seed=seed), max_new_tokens=6, processors=processors
        )
        for seed, (name, processors) in enumerate(
            {"a": quiet, "b": LogitsProcessorList([Turns(ends, 2)]), "c": quiet}.items()
        )
    }
    expected = {name: alone(runner, requests[name]) for name in "ac"}
    for request in requests.values():
        engine.add_request(request)
    tokens, errors = serve(engine)
    assert list(errors) == (["b"] if fails and "b" not in victims else [])
    for name in "ac":
        assert tokens[name] == (expected[name][: len(tokens[name])] if name in victims else expected[name])
    assert engine.statistics.aborted == len(victims) and engine.statistics.failed == len(errors)


@dataclass
class Arrival:
    request: Request
    step: int
    evil: tuple[str, int] | None


@st.composite
def workloads(draw: st.DrawFn) -> list[Arrival]:
    """2 to 8 requests that share beginnings, of which at least one turns evil at some token."""
    arrivals = []
    for number in range(draw(st.integers(2, 8))):
        request = plain(number, draw(st.integers(1, 24)), draw(st.integers(1, 12)))
        evil = None
        if number == 0 or draw(st.integers(0, 3)) == 0:
            evil = draw(st.sampled_from(sorted(EVILS))), draw(st.integers(0, 5))
            request = evil_request(request.request_id, request.prompt_token_ids, *evil, do_sample=draw(st.booleans()))
        arrivals.append(Arrival(request, draw(st.integers(0, 8)), evil))
    return arrivals


@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_turns_evil_at_whatever_moment_ends_alone(open_runner: Opener, policy: Any) -> None:
    runner = open_runner("llama")

    @examples(20)
    @given(workloads())
    def check(arrivals: list[Arrival]) -> None:
        engine = Engine(runner, SchedulerOptions(policy=policy), vocab_size=VOCAB)
        tokens: dict[str, list[int]] = {arrival.request.request_id: [] for arrival in arrivals}
        failed: dict[str, RequestFailedError] = {}
        step = 0
        while engine.has_work or step <= max(arrival.step for arrival in arrivals):
            for arrival in (arrival for arrival in arrivals if arrival.step == step):
                engine.add_request(arrival.request)
            for event in engine.step():
                if isinstance(event, RequestFailure):
                    failed[event.request_id] = event.error
                else:
                    tokens[event.request_id].append(event.token_id)
            check_cache(engine.scheduler.cache)
            step += 1
            assert step < LENGTH * len(arrivals)
        assert set(failed) == {arrival.request.request_id for arrival in arrivals if arrival.evil}
        for arrival in arrivals:
            name = arrival.request.request_id
            if arrival.evil:
                assert len(tokens[name]) == arrival.evil[1]
            else:
                assert tokens[name] == alone(runner, arrival.request)

    check()
