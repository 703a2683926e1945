# SPDX-License-Identifier: Apache-2.0
"""/v1/completions as OpenAI's client sees it, the other routes, keys, and what is no route."""

from __future__ import annotations

import copy
import itertools
import time
from typing import Any

import openai
import pytest
import torch
from helpers import random_tokens
from served_app import CHAT, NAME, App, Start
from tokenizers.processors import TemplateProcessing

from optimum_neuron import NeuronModelForCausalLM


def ask(app: App, **options: Any) -> Any:
    return app.create("completion", **{"max_tokens": 8} | options)


def test_prompts_of_all_kinds_get_what_the_engine_gives_each(app: App) -> None:
    texts = ["Hi", "größer", "1 2 3 4 5 6"]
    ids = [app.served.tokenizer(text)["input_ids"] for text in texts]
    expected = [app.read(app.tokens(each, 8)) for each in ids]
    for prompt, wanted in ((texts[0], expected[:1]), (texts, expected), (ids[1], expected[1:2]), (ids, expected)):
        answer = ask(app, prompt=prompt)
        assert [choice.text for choice in answer.choices] == wanted
        assert [choice.index for choice in answer.choices] == list(range(len(wanted)))
    with pytest.raises(openai.BadRequestError, match="echo=True is not supported"):
        ask(app, prompt="Hi", echo=True)
    assert answer.object == "text_completion" and answer.usage.prompt_tokens == sum(map(len, ids))
    twice = ask(app, prompt=texts[:2], n=2)  # choices of one prompt come before those of the next
    assert [choice.text for choice in twice.choices] == [expected[0]] * 2 + [expected[1]] * 2


def test_a_stop_string_ends_one_of_several_and_the_engine_is_told(app: App) -> None:
    options = {"max_tokens": 40, "temperature": 1.5, "seed": 3, "n": 2, "extra_body": {"ignore_eos": True}}
    first, second = (choice.text for choice in ask(app, prompt="Hi", **options).choices)
    stop = next(first[place : place + 3] for place in range(12) if first[place : place + 3] not in second)
    before = app.service.engine.statistics.generated_tokens
    answer = ask(app, prompt="Hi", stop=stop, **options)
    assert [choice.text for choice in answer.choices] == [first[: first.index(stop)], second]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    while app.service.engine.has_work:
        time.sleep(0.002)
    assert app.service.engine.statistics.generated_tokens - before < 75
    assert app.gate.live == 0


def test_begin_tokens_stand_before_prompts_and_a_template_writes_its_own(start: Start, tokenizer: Any) -> None:
    begins = copy.deepcopy(tokenizer)
    begins.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    counts = []
    for each in (tokenizer, begins):
        app = start(tokenizer=each)
        answers = app.chat(max_tokens=1), app.complete(max_tokens=1)
        counts.append([answer.json()["usage"]["prompt_tokens"] for answer in answers])
        app.close()
    assert counts[1] == [counts[0][0], counts[0][1] + 1]


def test_log_probabilities_are_those_of_the_logits(start: Start, model: NeuronModelForCausalLM) -> None:
    app, prompt = start(), random_tokens(9).tolist()
    tokens = app.tokens(prompt, 5)
    told = ask(app, prompt=prompt, logprobs=3, max_tokens=5).choices[0].logprobs
    zero = ask(app, prompt=prompt, logprobs=0, max_tokens=5).choices[0].logprobs
    app.close()
    for place, token in enumerate(tokens):
        best = model(torch.tensor([prompt + tokens[:place]]), logits_to_keep=1).logits[0, 0].log_softmax(-1).topk(3)
        assert told.tokens[place] == app.served.tokenizer.decode([token])
        assert told.token_logprobs[place] == pytest.approx(float(best.values[0]), abs=1e-4)
        # Tokens that are parts of characters read alike, and stand in one place.
        assert set(told.top_logprobs[place]) == {app.served.tokenizer.decode([each]) for each in best.indices}
    assert told.token_logprobs == zero.token_logprobs and all(len(each) == 1 for each in zero.top_logprobs)
    assert told.text_offset == sorted(told.text_offset) and told.text_offset[0] == 0


@pytest.mark.parametrize("name", [NAME, "some/folder"])
def test_a_healthy_server_lists_its_model_and_finds_it_by_its_name(start: Start, name: str) -> None:
    app = start(api_key="none", name=name)  # the key that the client sends
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = app.request(method, path)
        assert answer.status_code == 200 and answer.text == ""
    (model,) = app.asked(lambda client: client.models.list()).data
    assert model.id == name and model.max_model_len == app.served.config.sequence_length
    assert app.asked(lambda client: client.models.retrieve(name)) == model
    with pytest.raises(openai.NotFoundError, match=f"this server has '{name}'"):
        app.asked(lambda client: client.models.retrieve("org/other"))


def test_what_is_no_route_is_told_in_openais_form(app: App) -> None:
    wrong = {"GET /v1/chat/completions": 405, "POST /v1/embeddings": 404, "GET /": 404, "PUT /health": 405}
    for line, status in wrong.items():
        answer = app.request(*line.split())
        assert answer.status_code == status, line
        assert "/v1/chat/completions" in answer.json()["error"]["message"]

    answer = app.request("GET", "/health/", host="elsewhere.example")
    assert answer.status_code == 404 and "elsewhere" not in answer.text + str(answer.headers)
    assert app.request("GET", "/nowhere", host="[").status_code == 404


def test_without_the_key_nothing_under_v1_is_answered(start: Start) -> None:
    app = start(api_key="secret")
    keys = ("Bearer wrong", "Bearer", "secret", "Basic secret", "Bearer secrets", "Bearer secret secret")
    wrong: list[dict[str, str]] = [{}, *({"authorization": key} for key in keys)]
    paths = (("GET", "/v1/models"), ("POST", "/invocations"), ("GET", "/v1/none"))
    for headers, (method, path) in itertools.product(wrong, paths):
        answer = app.request(method, path, **headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key" and "secret" not in answer.text
    assert app.request("GET", "/health").status_code == app.request("GET", "/metrics").status_code == 200
    assert app.metric("request_refused_total", status="401") == 21


def test_an_invocation_is_what_its_body_says(app: App) -> None:
    greedy = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    chat = app.request("POST", "/invocations", {"messages": CHAT, **greedy}).json()
    assert chat["object"] == "chat.completion" and chat["choices"] == app.chat(**greedy).json()["choices"]
    text = app.request("POST", "/invocations", {"prompt": "Hi", "model": NAME, **greedy}).json()
    assert text["object"] == "text_completion" and text["choices"] == app.complete(**greedy).json()["choices"]
    streamed = app.request("POST", "/invocations", {"prompt": "Hi", "stream": True, **greedy})
    assert streamed.text.endswith("data: [DONE]\n\n")
    for body in ({}, {"prompt": "Hi", "messages": CHAT}):
        refused = app.request("POST", "/invocations", body)
        assert refused.status_code == 400 and "either 'messages', of a chat, or 'prompt'" in refused.text
    assert app.request("POST", "/invocations", {"prompt": "Hi", "model": "other"}).status_code == 404
