# SPDX-License-Identifier: Apache-2.0
"""Requests that are wrong, or ask for what this server cannot do: one sentence in OpenAI's form, and nobody is harmed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from served_app import CHAT, App


# A member, its value, and words of the refusal; of both routes.
BOTH = [
    ("n", 0, "n is 0; give a whole number from 1 to 128"),
    ("max_tokens", "5", "max_tokens is '5'"),
    ("max_tokens", 64, "max_tokens=64 do not fit the model's length of 64 tokens; lower max_tokens to"),
    ("temperature", -0.1, "temperature is -0.1; give a number from 0 to 100"),
    ("temperature", 10**400, "temperature is"),
    ("top_p", 1.1, "top_p is 1.1; give a number from 0 to 1"),
    ("seed", 2**70, "seed is"),
    ("stop", [""], "give strings of 1 to 256 characters"),
    ("stop", ["x"] * 17, "up to 16 strings"),
    ("stop", [1], "stop is [1]"),
    ("stop_token_ids", [300], "stop_token_ids has the token id 300, and the model's are 0 to 299"),
    ("stream", 1, "stream is 1; give true or false"),
    ("user", 5, "user is 5"),
    ("frequency_penalty", 0.5, "frequency_penalty=0.5 is not supported; leave it out, or serve the artifact by vLLM"),
    ("logit_bias", {"5": 1}, "logit_bias={'5': 1} is not supported"),
    ("min_tokens", 3, "min_tokens=3 is not supported"),
    ("best_of", 2, "best_of=2 is not supported"),
    ("cache_salt", "x", "cache_salt='x' is not supported; leave it out"),
    ("x" * 500, 1, "is no member that this server knows"),
    ("\ud800", 1, "'\\ud800' is no member that this server knows"),
    ("model", "other", "the model 'other' does not exist; this server has 'tiny'"),
    ("model", None, "the request names no model; this server has 'tiny'"),
    ("model", 7, "model is 7; give a string"),
]
CHATS = [
    ("messages", None, "messages is None"),
    ("messages", ["Hi"], "messages[0] is 'Hi'"),
    ("messages", [{"content": "Hi"}], "messages[0] has no role"),
    ("messages", [*CHAT, {"role": "user", "content": 5}], "messages[1].content has"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content has {'image_url'"),
    ("messages", [{"role": "user", "content": "\ud800"}], "half of a surrogate pair at character 0"),
    ("messages", [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
        "messages[0].tool_calls has {}; give calls with function.name and function.arguments"),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}],
        "messages[0].tool_calls arguments has '[1'; give a JSON object"),
    ("messages", [{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls is not supported"),
    ("messages", [{"role": "user", "content": "Hi", "\ud800": 1}], "messages[0].? is not supported"),
    ("messages", [{"role": "user", "content": "x" * 10**6}], "the prompt has 1,000,000 characters, which no 64 tokens"),
    ("messages", [{"role": "user", "content": "x"}] * 65, "the prompt has 65 messages, and the model's length is 64"),
    ("messages", [{"role": "user", "content": "x" * 200}], "the prompt has 218 tokens, and the model's length is 64"),
    ("max_completion_tokens", 60, "max_completion_tokens=60 do not fit"),
    ("logprobs", 3, "logprobs is 3; give true or false"),
    ("top_logprobs", 2, "top_logprobs=2 has no meaning without logprobs=true"),
    ("tools", [{"type": "function"}], "tools=[{'type': 'function'}] is not supported"),
    ("tool_choice", "required", "tool_choice='required' is not supported"),
    ("response_format", {"type": "json_object"}, "response_format={'type': 'json_object'} is not supported"),
    ("prompt", "Hi", "'prompt' is no member"),
    ("add_generation_prompt", 1, "add_generation_prompt is 1; give true or false"),
    ("chat_template_kwargs", [], "chat_template_kwargs is []; give an object"),
    *[
        ("chat_template_kwargs", {name: "x"}, f"chat_template_kwargs has '{name}', which the server sets")
        for name in ("self", "messages", "chat_template", "tools", "tokenize", "bos_token")
    ],
]  # fmt: skip
COMPLETIONS = [
    ("prompt", "", "the prompt has 0 tokens"),
    ("prompt", [[]], "the prompt has 0 tokens"),
    ("prompt", ["Hi", 5], "prompt is ['Hi', 5]"),
    ("prompt", [[[1]]], "prompt is [[[1]]]"),
    ("prompt", [5, 300], "prompt has the token id 300, and the model's are 0 to 299"),
    ("prompt", [True], "prompt has the token id True"),
    ("prompt", "x" * 65, "the prompt has 65 tokens, and the model's length is 64 tokens; shorten it, or export"),
    ("prompt", "x" * 10**6, "the prompt has 1,000,000 characters, which no 64 tokens have"),
    ("prompt", ["Hi"] * 12, "the request has 12 prompts and choices, and the server takes in 11 at once"),
    ("prompt", "a\udfffb", "prompt has half of a surrogate pair at character 1"),
    ("logprobs", 4, "the 4 most likely tokens, and this artifact returns 3"),
    ("suffix", "x", "suffix='x' is not supported; leave it out"),
    ("messages", CHAT, "'messages' is no member"),
    ("max_completion_tokens", 5, "'max_completion_tokens' is no member"),
]


@pytest.mark.parametrize("route", ["chat", "completion"])
def test_a_wrong_request_is_refused_in_one_sentence(app: App, route: str) -> None:
    ask = app.chat if route == "chat" else app.complete
    for number, (name, value, words) in enumerate(BOTH + (CHATS if route == "chat" else COMPLETIONS)):
        answer = ask(**{"stream": number % 2 > 0, name: value})  # a stream that is refused is no stream
        assert answer.status_code == (404 if words.startswith("the model '") else 400), answer.text
        error = answer.json()["error"]
        assert words in error["message"] and "\n" not in error["message"] and len(error["message"]) < 700
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert error["param"] is not None
        unsupported = error["message"].startswith(f"{name}=") and "is not supported" in words
        assert not unsupported or error["code"] == "unsupported_parameter"
        assert answer.status_code == 400 or error["code"] == "model_not_found"
    assert app.gate.live == 0 and app.service.engine.statistics.steps == 0


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens=3 and max_completion_tokens=4 differ"),
    ({"stream": True, "stream_options": 5}, "stream_options is 5"),
    ({"stream_options": {"include_usage": True}}, "stream_options has no meaning without stream=true"),
    ({"stream": True, "stream_options": {"zebra": 1}}, "stream_options has no member 'zebra'"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage is 1"),
    ({"logprobs": True, "top_logprobs": 4}, "and this artifact returns 3; ask for fewer, or export it with --top-logprobs 4"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt=true and continue_final_message=true contradict"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        "reasoning_effort='low' and that of chat_template_kwargs differ"),
]  # fmt: skip


def test_members_that_contradict_each_other_are_refused(app: App) -> None:
    for options, words in CONTRADICTIONS:
        answer = app.chat(**options)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], words


def test_members_with_the_value_that_changes_nothing_are_taken(app: App) -> None:
    neutral = {
        "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "tools": [], "tool_choice": "none", "n": 1,
        "response_format": {"type": "text"}, "seed": None, "stop": None, "parallel_tool_calls": True,
        "repetition_penalty": 1.0, "stop_token_ids": [], "zebra": None, "max_tokens": 3.0, "max_completion_tokens": 3,
        "priority": 0, "user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "flex", "verbosity": "low",
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s", "prediction": {"type": "content"},
        "bad_words": [], "detokenize": True, "include_stop_str_in_output": False, "spaces_between_special_tokens": True,
    }  # fmt: skip
    assert app.chat(**neutral).json()["usage"]["completion_tokens"] == 3
    cold, coldest = (app.complete(temperature=heat, max_tokens=2).json()["choices"] for heat in (1e-300, 0))
    assert cold == coldest
    assert app.complete(best_of=2, n=2, echo=False, suffix="", max_tokens=2).status_code == 200


NO_OBJECTS = [
    (b"", 400, "the body is no JSON"),
    (b"{", 400, "the body is no JSON"),
    (b"\xff\xfe\x00", 400, "the body is no UTF-8"),
    (b"null", 400, "the body is a JSON NoneType"),
    (b'{"temperature": NaN}', 400, "NaN is no number of JSON"),
    (b'{"seed": ' + b"9" * 5000 + b"}", 400, "the body has a number of too many digits; send a shorter one"),
    (b"[" * 100_000, 400, "the body is nested too deep; send objects and lists as OpenAI's API has them"),
    (b"[" + b"0," * 2**18 + b"0]", 413, "the body has more than 262,144 values and escaped characters"),
    (b'["' + rb"\u00e9" * 2**18 + b'"]', 413, "the body has more than 262,144 values and escaped characters"),
    (b"{" + b'"zebra": 1, ' * 100_000 + b'"model": "tiny", "prompt": "Hi"}', 400, "'zebra' is no member"),
    (b" " * (16 * 2**20 + 1), 413, "the body has more than 16,777,216 bytes"),
]


def test_a_body_that_is_no_object_is_refused(app: App) -> None:
    for body, status, words in NO_OBJECTS:
        answer = app.request("POST", "/v1/completions", body)
        assert answer.status_code == status and words in answer.json()["error"]["message"], words


TEXTS = st.text(st.characters(codec=None), max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(sorted({name for name, *_ in BOTH + CHATS} | {"chat_template_kwargs", "metadata"})) | TEXTS


@examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(NAMES, VALUES, max_size=3))
def test_whatever_a_body_has_is_answered_or_refused_in_utf8(app: App, body: dict[str, Any]) -> None:
    answer = app.chat(**{"max_tokens": 1} | body)
    assert answer.status_code in (200, 400, 404, 429), answer.text
    assert "stream" in body or json.loads(answer.content.decode("utf-8"))
