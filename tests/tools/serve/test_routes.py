# SPDX-License-Identifier: Apache-2.0
"""The other routes, keys, and what is no route."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import openai
import pytest
from served_app import CHAT, NAME, App


def test_the_model_is_listed_with_its_length_and_found_by_its_name(app: App) -> None:
    (model,) = app.asked(lambda client: client.models.list()).data
    assert model.id == NAME and model.max_model_len == app.served.config.sequence_length
    assert app.asked(lambda client: client.models.retrieve(NAME)) == model
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        app.asked(lambda client: client.models.retrieve("org/other"))


def test_what_is_no_route_is_told_in_openais_form(app: App) -> None:
    wrong = {"GET /v1/chat/completions": 405, "POST /v1/embeddings": 404, "GET /": 404, "PUT /health": 405}
    for line, status in wrong.items():
        answer = app.request(*line.split())
        assert answer.status_code == status, line
        assert "/v1/chat/completions" in answer.json()["error"]["message"]


def test_a_healthy_server_says_so_and_a_key_and_a_path_are_taken(start: Callable[..., App]) -> None:
    app = start(api_key="none", name="some/folder")  # the key that the client sends
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = app.request(method, path)
        assert answer.status_code == 200 and answer.text == ""
    assert app.asked(lambda client: client.models.retrieve("some/folder")).id == "some/folder"


def test_no_address_is_made_of_what_a_client_says(app: App) -> None:
    answer = app.request("GET", "/health/", host="elsewhere.example")
    assert answer.status_code == 404 and "elsewhere" not in answer.text + str(answer.headers)
    assert app.request("GET", "/nowhere", host="[").status_code == 404


def test_without_the_key_nothing_under_v1_is_answered(start: Callable[..., App]) -> None:
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
