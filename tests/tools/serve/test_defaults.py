# SPDX-License-Identifier: Apache-2.0
"""A model's own generation_config.json means the same through every door, and never refuses a request that says nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import LENGTH
from published_defaults import PUBLISHED, RARE
from served_app import CHAT, App, Start
from transformers import AutoModelForCausalLM, GenerationConfig, pipeline

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.engine.continuous_batching.requests import RequestFactory
from optimum_neuron.runtime.defaults import in_vocabulary, usable, vllm_sampling
from optimum_neuron.step.spec import GREEDY, SamplingParams
from optimum_neuron.tools.chat.session import ChatSession, Turn
from optimum_neuron.tools.chat.settings import Settings


# A penalty, a length beyond the slot, and what the graphs cannot choose; every door is one over the same request for the others.
THROUGH_ALL = ("qwen-chat", "at least", "bad words")
PROMPT = [40, 41, 42, 40, 41, 42, 40]
NEW = 8


@pytest.fixture(scope="module")
def reference(sharp_checkpoints: dict[str, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(sharp_checkpoints["llama"], dtype=torch.float32)


Follow = Callable[[dict[str, Any]], None]


@pytest.fixture
def follow(model: NeuronModelForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Follow:
    """Give the model the defaults of a file, as if it were loaded with them."""

    def follow(facts: dict[str, Any]) -> None:
        config = usable(GenerationConfig.from_dict(facts), model.neuron_config)[0]
        monkeypatch.setattr(model, "generation_config", in_vocabulary(config, model.artifact.model))

    return follow


def of_transformers(reference: Any, facts: dict[str, Any], ids: list[int], **options: Any) -> list[int]:
    left_out = {"num_beams", "num_return_sequences"}
    if facts.get("temperature") == 0.0:
        left_out |= {"temperature", "top_k", "eos_token_id", "pad_token_id"}
    kept = {name: each for name, each in facts.items() if name not in left_out}
    reference.generation_config = GenerationConfig(**kept)
    return reference.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()


def chat_ids(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    return ids


@pytest.mark.parametrize("name", [*PUBLISHED, *RARE])
def test_a_silent_request_gets_what_the_file_says(name: str, model: NeuronModelForCausalLM, follow: Follow) -> None:
    facts = (PUBLISHED | RARE)[name]
    follow(facts)
    request = RequestFactory(model, None, None).make_request("r", PROMPT, None)
    draws = facts.get("do_sample", False) and facts.get("temperature", 1.0) > 0
    wanted = {name: facts[name] for name in ("temperature", "top_p", "min_p") if name in facts}
    expected = SamplingParams(facts.get("top_k", 50), **{"temperature": 1.0} | wanted) if draws else GREEDY
    assert request.do_sample == draws and request.sampling in (expected, expected.in_float32())
    told = {name: facts[name] for name in (*wanted, "top_k", "repetition_penalty", "max_new_tokens") if name in facts}
    if draws:
        assert vllm_sampling(model.generation_config) == told
    else:
        assert vllm_sampling(model.generation_config)["temperature"] == 0.0


@pytest.mark.parametrize("name", ["llama-2-chat", "short"])
def test_silence_gets_an_answer(
    name: str, model: NeuronModelForCausalLM, start: Start, tokenizer: Any, follow: Follow
) -> None:
    """Also where the file's lengths are longer than a slot, or shorter than the prompt."""
    follow((PUBLISHED | RARE)[name])
    assert model.generate(torch.tensor([PROMPT] * 2)).shape[1] <= LENGTH + 1
    assert model.generate_batch([PROMPT])["req_0"].error is None
    assert pipeline("text-generation", model=model, tokenizer=tokenizer)("hello")[0]["generated_text"]
    app = start()
    assert app.chat().status_code == 200
    if not model.generation_config.do_sample:
        silent, best = (app.complete(PROMPT, max_tokens=4, **options) for options in ({}, {"temperature": 0}))
        assert silent.json()["choices"] == best.json()["choices"]
    session = ChatSession(model, app.service, tokenizer)
    assert session.send_message("Hi", lambda text: None).ending in ("stop", "length")


Doors = Callable[[int], tuple[App, list[list[int]], list[str], Turn]]


@pytest.fixture
def doors(model: NeuronModelForCausalLM, tokenizer: Any, start: Start) -> Doors:
    """Return a server, the best tokens by each door that returns tokens, the texts of those that return text, and a chat's turn."""
    return partial(through_every_door, model, tokenizer, start)


def through_every_door(
    model: NeuronModelForCausalLM, tokenizer: Any, start: Start, most: int
) -> tuple[App, list[list[int]], list[str], Turn]:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": most}
    chat = chat_ids(tokenizer)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    tokens = [
        model.generate(torch.tensor([chat]), **options)[0, len(chat) :].tolist(),
        model.generate_batch([chat], GenerationConfig(**options))["req_0"].generated_tokens,
        pipe(tokenizer.decode(chat), return_tensors=True, **options)[0]["generated_token_ids"][len(chat) :],
    ]
    app = start()
    session = ChatSession(model, app.service, tokenizer, Settings(temperature=0, max_new_tokens=most))
    turn = session.send_message(CHAT[0]["content"], lambda text: None)
    texts = [
        app.complete(chat, max_tokens=most, temperature=0).json()["choices"][0]["text"],
        app.chat(max_tokens=most, temperature=0).json()["choices"][0]["message"]["content"],
        turn.text,
    ]
    return app, tokens, texts, turn


@pytest.mark.parametrize("name", THROUGH_ALL)
def test_the_best_tokens_are_the_same(name: str, reference: Any, tokenizer: Any, doors: Doors, follow: Follow) -> None:
    facts = (PUBLISHED | RARE)[name]
    follow(facts)
    expected = of_transformers(reference, facts, chat_ids(tokenizer), do_sample=False, max_new_tokens=NEW)
    app, tokens, texts, _ = doors(NEW)
    ends = expected[-1:] and expected[-1] in app.served.requests.eos_token_ids  # which has no text
    assert tokens == [expected] * 3 and texts == [app.read(expected[:-1] if ends else expected)] * 3


def test_stop_strings_of_the_file_end_every_text(reference: Any, tokenizer: Any, doors: Doors, follow: Follow) -> None:
    """As transformers ends them, and chats and servers before the string."""
    chat = chat_ids(tokenizer)
    free = of_transformers(reference, {}, chat, do_sample=False, max_new_tokens=12)
    stop = tokenizer.decode(free[3:5])
    facts = {"stop_strings": [stop]}
    follow(facts)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "tokenizer": tokenizer}
    expected = of_transformers(reference, facts, chat, **options)
    assert len(expected) < len(free)
    app, tokens, texts, turn = doors(12)
    assert tokens == [expected] * 3
    assert texts == [app.read(expected).partition(stop)[0]] * 3
    assert (turn.ending, turn.generated) == ("stop", len(expected)), "no token is computed after the string"
    for own, text in (([], app.read(free)), ([app.read(free[1:2])], app.read(free).partition(app.read(free[1:2]))[0])):
        answer = app.complete(chat, max_tokens=12, temperature=0, stop=own).json()["choices"][0]["text"]
        assert answer == text  # what a request says itself goes first
    whole = app.complete(chat, max_tokens=12, temperature=0, ignore_eos=True).json()["choices"][0]["text"]
    assert whole == app.read(free)


def test_the_longest_time_of_the_file_ends_texts(model: NeuronModelForCausalLM, doors: Doors, follow: Follow) -> None:
    follow({"max_time": 1e-9})
    app, tokens, texts, _ = doors(12)
    assert [len(each) for each in tokens] == [1] * 3 and texts == [app.read(tokens[0])] * 3
    answer = app.complete(PROMPT, max_tokens=12).json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 1
    app.close()
    follow({"max_time": 3600.0})
    assert len(model.generate_batch([PROMPT], max_new_tokens=NEW)["req_0"].generated_tokens) == NEW


def test_the_host_draws_as_transformers_does(model: NeuronModelForCausalLM, reference: Any, follow: Follow) -> None:
    for facts in (PUBLISHED["qwen2.5-instruct"], RARE["what draws"]):
        follow(facts)
        torch.manual_seed(5)
        expected = of_transformers(reference, facts, PROMPT, max_new_tokens=NEW)
        torch.manual_seed(5)
        assert model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW)[0, len(PROMPT) :].tolist() == expected


def test_a_request_that_names_a_value_draws_by_it_and_by_the_files_others(start: Start, follow: Follow) -> None:
    follow(PUBLISHED["mistral-instruct"])
    app = start()
    best = app.tokens(PROMPT, 8)
    whole = app.tokens(PROMPT, 8, sampling=SamplingParams(temperature=1.0), seed=3)
    half = app.tokens(PROMPT, 8, sampling=SamplingParams(temperature=1.0, top_p=0.5), seed=3)
    answers = {'{"temperature": 1}': whole, '{"top_p": 0.5}': half, '{"top_k": -1}': best, '{"min_p": 0}': best}
    for asked, tokens in answers.items():
        options = json.loads(asked) | {"seed": 3, "max_tokens": 8, "ignore_eos": True}
        assert app.complete(PROMPT, **options).json()["choices"][0]["text"] == app.read(tokens), asked
    follow(PUBLISHED["qwen3"])
    app.close()
    asked = start().served.requests.make_request("r", PROMPT, 8, sampling={"do_sample": True, "temperature": 2.0})
    assert asked.sampling == SamplingParams(20, 0.95, 2.0).in_float32()


def test_log_probabilities_of_what_the_host_chooses_are_those_of_the_logits(
    model: NeuronModelForCausalLM, tokenizer: Any, start: Start, follow: Follow
) -> None:
    """As where the graphs choose: a penalty changes the choice, and not what is told of it."""
    follow(RARE["bad words"])
    chat = torch.tensor([chat_ids(tokenizer)])
    best = model(chat, logits_to_keep=1).logits[0, 0].log_softmax(-1).topk(3).values.tolist()
    answer = start().chat(max_tokens=1, temperature=0, logprobs=True, top_logprobs=3).json()
    (told,) = answer["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in told["top_logprobs"]] == pytest.approx(best, abs=1e-4)
    assert told["logprob"] < best[-1]
