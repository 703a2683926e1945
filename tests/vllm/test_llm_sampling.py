# SPDX-License-Identifier: Apache-2.0
"""Who chooses tokens in vLLM's engine: the graphs with the request's own random numbers, or vLLM's sampler from logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import artifact_runner
from llm_answers import ask, ask_each, choose_by, graph_runner, logits_after, random_prompt
from vllm import LLM
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from optimum_neuron import Request
from optimum_neuron import SamplingParams as OnDevice
from optimum_neuron.engine.engine import Engine


VOCAB = 49152
PROMPTS = [random_prompt(length, 3) for length in (3, 40, 33, 7, 64)]
ON_DEVICE: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 1},
    {"temperature": 1.5, "top_k": 200, "seed": 2},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.5, "seed": 3},
    {"temperature": 0.3, "min_p": 0.05, "seed": 0},
    {"temperature": 1.0, "seed": 4},
]
ON_HOST: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_k": 1000, "repetition_penalty": 1.1, "seed": 1},
    {"temperature": 1.2, "logit_bias": {5: 1.0}, "seed": 2},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05, "seed": 3},
    {"temperature": 1.0, "top_p": 0.8, "presence_penalty": 1.0, "seed": 4},
    {"temperature": 0.7, "top_k": 20, "logprobs": 3, "seed": 5},
]
# Sums in float32 are rounded in another order than transformers'. Measured on log probabilities around -10: 9.6e-7.
NOISE = 1e-5


@pytest.fixture
def llm(export_text: Callable[..., Path], open_llm: Callable[..., LLM]) -> LLM:
    return open_llm(export_text())


def tokens_of(llm: LLM, params: Sequence[dict[str, Any]]) -> list[list[int]]:
    """One request for each of PROMPTS, all at once."""
    return [list(output.outputs[0].token_ids) for output in ask_each(llm, PROMPTS, params, max_tokens=10)]


def test_seeded_tokens_of_the_graphs_are_those_of_our_engine(export_text: Callable[..., Path], llm: LLM) -> None:
    engine = Engine(artifact_runner(export_text()), vocab_size=VOCAB)
    answers: dict[str, list[int]] = {}
    for index, (prompt, params) in enumerate(zip(PROMPTS, ON_DEVICE, strict=True)):
        sampling = OnDevice(**{name: value for name, value in params.items() if name != "seed"})
        how = {"max_new_tokens": 10, "sampling": sampling, "seed": params["seed"]}
        engine.add_request(Request(request_id=str(index), prompt_token_ids=prompt, **how))
    for event in engine.run_requests():
        answers.setdefault(event.request_id, []).append(event.token_id)
    assert tokens_of(llm, ON_DEVICE) == [answers[str(index)] for index in range(len(PROMPTS))]


@pytest.mark.parametrize("params", [ON_DEVICE, ON_HOST], ids=["graphs sample", "vllm samples"])
def test_a_seed_gives_the_same_tokens_whatever_the_neighbours_and_the_chunks(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM], llm: LLM, params: list[dict[str, Any]]
) -> None:
    together = tokens_of(llm, params)
    alone = [
        ask(llm, [prompt], 10, **each)[0] for prompt, each in zip(reversed(PROMPTS), reversed(params), strict=True)
    ]
    assert alone[::-1] == together
    chunked = open_llm(export_text(), max_num_batched_tokens=7, async_scheduling=False)
    assert tokens_of(chunked, params) == together
    mixed_kinds = [a if index % 2 else b for index, (a, b) in enumerate(zip(ON_DEVICE, ON_HOST, strict=True))]
    assert [tokens == kept for tokens, kept in zip(tokens_of(llm, mixed_kinds), together, strict=True)] == [
        each in params for each in mixed_kinds
    ]
    others = [each | {"seed": each["seed"] + 100} for each in params]
    assert tokens_of(llm, others) != together


def test_logprobs_are_those_of_transformers_beside_requests_without_any(llm: LLM, text_model: Any) -> None:
    params = [{"temperature": 0, "logprobs": 5}, {"temperature": 0}, {"temperature": 0, "logprobs": 0}, *ON_HOST[3:]]
    check_logprobs(llm, text_model, params)


def test_graphs_tell_logprobs_and_choose_the_same_tokens(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM], text_model: Any
) -> None:
    llm = open_llm(export_text(output_logits=False, top_logprobs=5))
    # More than the graphs tell, and what is chosen by the host beside it.
    others: list[dict[str, Any]] = [
        {"temperature": 1.0, "logprobs": 9, "seed": 4},
        {"repetition_penalty": 1.3, "logprobs": 2},
    ]
    check_logprobs(
        llm, text_model, [each | {"logprobs": count} for count, each in enumerate(ON_DEVICE[:3], 3)] + others
    )
    assert tokens_of(llm, [each | {"logprobs": 2} for each in ON_DEVICE]) == tokens_of(llm, ON_DEVICE)


def check_logprobs(llm: LLM, text_model: Any, params: Sequence[dict[str, Any]]) -> None:
    """Asks for six tokens of each of PROMPTS; log-probabilities are transformers'."""
    outputs = ask_each(llm, PROMPTS, params, max_tokens=6)
    for prompt, each, output in zip(PROMPTS, params, outputs, strict=True):
        answer = output.outputs[0]
        if "logprobs" not in each:
            assert answer.logprobs is None
            continue
        assert answer.logprobs is not None and len(answer.logprobs) == 6
        for index, at in enumerate(answer.logprobs):
            expected = torch.log_softmax(logits_after(text_model, [*prompt, *answer.token_ids[:index]]), dim=-1)
            best = expected.topk(each["logprobs"]).indices.tolist()
            assert set(at) == {answer.token_ids[index], *best}
            for token, found in at.items():
                assert abs(found.logprob - float(expected[token])) < NOISE
                above, near = (int((expected > expected[token] + shift).sum()) for shift in (NOISE, -NOISE))
                assert above + 1 <= found.rank <= near


def test_parameters_that_leave_one_token_are_greedy(llm: LLM, text_model: Any) -> None:
    plain = choose_by(text_model, PROMPTS[2], 6, lambda logits, _: logits)
    for params in ({"min_p": 1.0}, {"top_p": 1e-6}, {"top_k": 1}, {"top_k": 1, "logprobs": 1}):
        assert ask(llm, [PROMPTS[2]], 6, **{"temperature": 1.0, "seed": 9} | params)[0] == plain, params


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": 1}, "logprobs"), ({"logprob_token_ids": [5]}, "logprobs"), ({"presence_penalty": 0.1}, "presence_penalty"),
    ({"frequency_penalty": 0.1}, "frequency_penalty"), ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"min_tokens": 1}, "min_tokens"), ({"logit_bias": {5: 1.0}}, "logit_bias"), ({"allowed_token_ids": [5]}, "allowed_token_ids"),
    ({"bad_words": ["no"]}, "bad_words"), ({"temperature": 1.0, "top_p": 0.9, "min_p": 0.1}, "min_p with top_p"),
    ({"structured_outputs": StructuredOutputsParams(choice=["a"])}, "structured outputs"),
]  # fmt: skip


def test_what_an_artifact_without_logits_cannot_honour_is_refused_and_others_are_served(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM], text_model: Any
) -> None:
    llm = open_llm(export_text(output_logits=False))
    expected = choose_by(text_model, PROMPTS[0], 5, lambda logits, _: logits)
    for params, reason in REFUSED:
        with pytest.raises(VLLMValidationError, match=f"{reason} needs logits on the host") as refusal:
            ask(llm, [PROMPTS[1]], 5, **params)
        assert "export it with --output-logits" in str(refusal.value), params
    assert not llm.llm_engine.has_unfinished_requests()
    assert ask(llm, [PROMPTS[0]], 5)[0] == expected
    assert len(ask(llm, [PROMPTS[0]], 5, temperature=1.0)[0]) == 5


def test_an_artifact_without_a_sampler_leaves_all_choices_to_vllm(
    export_text: Callable[..., Path], open_llm: Callable[..., LLM], llm: LLM, text_model: Any
) -> None:
    plain = open_llm(export_text(on_device_sampling=False, output_logits=False))
    assert graph_runner(plain).config.on_device_sampling is False
    expected = [choose_by(text_model, prompt, 5, lambda logits, _: logits) for prompt in PROMPTS]
    assert ask(plain, PROMPTS, 5) == expected
    assert tokens_of(plain, ON_HOST) == tokens_of(llm, ON_HOST)
    assert ask(plain, PROMPTS[:1], 5, temperature=1.0, top_k=3, seed=1) == ask(
        plain, PROMPTS[:1], 5, temperature=1.0, top_k=3, seed=1
    )
