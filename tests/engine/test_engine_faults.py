# SPDX-License-Identifier: Apache-2.0
"""A request that fails by itself ends alone: all others get what they get without it, and its slot serves the next."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import EVILS, SAMPLED, Turns, evil_request, filled, serve, serve_alone
from helpers import VOCAB, Opener, eager_runner, random_tokens, tiny_config
from torch import Tensor, nn
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.step.spec import GREEDY, SamplingParams


WIDE_SAMPLED = SamplingParams(temperature=1.5)


def plain(number: int, length: int) -> Request:
    """Greedy, sampled by the graphs, sampled by the host, by processors: in turn."""
    how: list[dict[str, Any]] = [
        {},
        {"sampling": SAMPLED},
        {"sampling": WIDE_SAMPLED},
        {"processors": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])},
    ]
    prompt = np.concatenate([random_tokens(17, seed=7), random_tokens(length, seed=number)])
    return Request(request_id=str(number), prompt_token_ids=prompt, max_new_tokens=9, seed=number, **how[number % 4])


@pytest.mark.parametrize("after", [0, 3])
def test_requests_with_tokens_that_cannot_be_chosen_end_alone(open_runner: Opener, after: int) -> None:
    runner = open_runner("llama")
    others = [plain(number, length) for number, length in enumerate((3, 12, 7, 20))]
    expected = {request.request_id: serve_alone(runner, request) for request in others}
    engine = Engine(runner, vocab_size=VOCAB)
    shared = others[1].prompt_token_ids
    evil = [evil_request(kind, shared, kind, after) for kind in EVILS]
    tokens, errors = serve(engine, [*others[:2], *evil, *others[2:]])
    assert {name: tokens[name] for name in expected} == expected
    assert errors.keys() == EVILS.keys()
    for kind, error in errors.items():
        assert len(tokens[kind]) == after
        assert re.search(f"request '{kind}' failed: .*{EVILS[kind][1]}", str(error))
        assert isinstance(error.__cause__, Exception)
    counted = engine.statistics
    assert (counted.finished, counted.aborted, counted.failed) == (4, 0, len(EVILS))
    assert counted.first_token_seconds.count == 4 + len(EVILS) * bool(after)
    # Whatever its slot is taken to hold is right: prompts that start as it did get what they get alone.
    again = Request(request_id="again", prompt_token_ids=shared, max_new_tokens=9)
    assert serve(engine, [again])[0]["again"] == serve_alone(runner, again)


def test_scores_that_cannot_be_drawn_from_end_their_request_alone(open_runner: Opener) -> None:
    """Temperatures that are next to nothing leave infinity."""
    runner = open_runner("llama", on_device_sampling=False)
    others = [plain(number, 5) for number in range(3)]
    expected = {request.request_id: serve_alone(runner, request) for request in others}
    engine = Engine(runner, vocab_size=VOCAB)
    for value in (torch.inf, -torch.inf, torch.nan):
        processors = LogitsProcessorList([Turns(filled(value), 2)])
        prompt = random_tokens(5)
        engine.add_request(
            Request(request_id=str(value), prompt_token_ids=prompt, processors=processors, do_sample=True)
        )
    tokens, errors = serve(engine, others)
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
        return serve_alone(runner, request)

    greedy = tokens()
    assert tokens(top_p=1e-300, temperature=1.0, top_k=40) == greedy
    assert tokens(top_p=0.0, temperature=1.0, top_k=40) == greedy
    assert tokens(top_k=10**400) == tokens(top_k=10**400, top_p=1e-300) == greedy
    assert tokens(top_k=10**400, temperature=2.0) == tokens(top_k=VOCAB, temperature=2.0)
    assert len(set(tokens(temperature=3e38, top_k=200))) > 4


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
    expected = {name: serve_alone(runner, requests[name]) for name in "ac"}
    tokens, errors = serve(engine, requests.values())
    assert list(errors) == (["b"] if fails and "b" not in victims else [])
    for name in "ac":
        assert tokens[name] == (expected[name][: len(tokens[name])] if name in victims else expected[name])
    assert engine.statistics.aborted == len(victims) and engine.statistics.failed == len(errors)


BROKEN = 77  # the token with a row of the embedding that is NaN


def clean_tokens(count: int, seed: int) -> np.ndarray:
    tokens = random_tokens(count, seed)
    return np.where(tokens == BROKEN, 4, tokens).astype(np.int32)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_request_with_numbers_that_are_not_finite_costs_the_others_nothing(
    tiny_models: dict[str, nn.Module], sampling: SamplingParams
) -> None:
    """All steps run in one graph: what a request gets is then the same to the bit, next to others and alone."""
    model: Any = copy.deepcopy(tiny_models["llama"])
    model.get_input_embeddings().weight.data[BROKEN] = torch.nan
    model.lm_head.weight.data[BROKEN] = -model.lm_head.weight.data.abs().mean()  # nobody draws it
    runner = eager_runner(model, tiny_config(), deterministic=True)
    shared = clean_tokens(20, seed=9)
    prompts = [np.concatenate([shared, clean_tokens(5 + number, seed=number)]) for number in range(6)]
    prompts[2][20], prompts[4][9] = BROKEN, BROKEN  # after the shared beginning, and within it
    requests = [
        Request(request_id=str(number), prompt_token_ids=prompt, max_new_tokens=9, sampling=sampling, seed=number)
        for number, prompt in enumerate(prompts)
    ]
    alone = {request.request_id: serve_alone(runner, request) for request in requests}
    engine = Engine(runner, vocab_size=VOCAB)
    for _ in range(2):  # the second time, all slots are used ones
        together, _ = serve(engine, requests)
        assert together == alone
    assert all(len(tokens) == 9 and set(tokens) <= set(range(VOCAB)) for tokens in together.values())
    assert together["2"] == together["4"] == [0] * 9  # as the argmax of NaN alone is
    assert len({tuple(tokens) for tokens in together.values()}) == 5
    assert engine.statistics.prefix_hit_tokens > 0
