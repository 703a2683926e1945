# SPDX-License-Identifier: Apache-2.0
"""What real clients send beside OpenAI's first members: templates' arguments, earlier calls of tools, counts, token ids, hints."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from served_app import CHAT, App, Start


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.x }}]{% endfor %};{% endfor %}"
    "{% if enable_thinking is defined %}<{{ enable_thinking }}>{% endif %}{{ reasoning_effort or '' }}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}


@pytest.fixture
def templated(start: Start, tokenizer: Any) -> App:
    """An application with a template that shows what reaches it."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = TEMPLATE
    return start(tokenizer=own)


READ: list[tuple[dict[str, Any], str]] = [
    ({}, "u:Hi;A:"),
    ({"chat_template_kwargs": {"enable_thinking": False, "unknown": 1}}, "u:Hi;<False>A:"),
    ({"reasoning_effort": "low"}, "u:Hi;<True>lowA:"),
    ({"reasoning_effort": "none"}, "u:Hi;<False>noneA:"),
    ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "u:Hi;<False>highA:"),
    ({"add_generation_prompt": False}, "u:Hi;"),
    ({"continue_final_message": True}, "u:Hi"),
    ({"messages": [*CHAT, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}, "u:Hi;a:[f 3];A:"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 4}}}]}]}, "a:[f 4];A:"),
    ({"messages": [{"role": "user", "name": "B", "content": [{"type": "text", "text": each} for each in "ab"]}]}, "u:a\nb;A:"),
    ({"messages": [{"role": "tool", "tool_call_id": "1", "content": "ok"}]}, "t:ok;A:"),
    ({"messages": [{"role": "assistant", "content": "x", "reasoning": "so", "refusal": None}]}, "a:x(so);A:"),
]  # fmt: skip


def test_what_a_template_may_read_reaches_it(templated: App) -> None:
    for options, text in READ:
        answer = templated.chat(max_tokens=1, return_token_ids=True, **options)
        assert templated.served.tokenizer.decode(answer.json()["prompt_token_ids"]) == text, answer.text
    answer = templated.chat(chat_template_kwargs={"enable_thinking": "\ud800"})  # which no UTF-8 has
    assert answer.status_code == 400 and "chat template refuses" in answer.json()["error"]["message"]


# What these programs send, as facts: guidellm 0.3, and the SDK of OpenAI with all of its hints.
BODIES: dict[str, dict[str, Any]] = {
    "guidellm": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "stream": True, "stop": None,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "ignore_eos": True,
        "max_completion_tokens": 4, "max_tokens": 4,
    },
    "openai": {
        "messages": CHAT, "max_completion_tokens": 4, "metadata": {"a": "b"}, "prediction": {"type": "content", "content": "x"},
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s", "service_tier": "priority",
        "store": True, "verbosity": "low",
    },
    # Every member of vLLM 0.32's request that has a default, at that.
    "vllm": {
        "messages": CHAT, "logprobs": False, "top_logprobs": 0, "n": 1, "stop": [], "stream": False, "max_tokens": 4,
        "tool_choice": "none", "include_reasoning": True, "parallel_tool_calls": True, "use_beam_search": False, "length_penalty": 1.0,
        "stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True,
        "spaces_between_special_tokens": True, "bad_words": [], "echo": False, "add_generation_prompt": True,
        "continue_final_message": False, "add_special_tokens": False, "priority": 0, "request_id": "x", "session_id": "y",
        "return_tokens_as_token_ids": False, "return_token_ids": False, "routed_experts_prompt_start": 0,
        "return_token_offsets": False, "return_prompt_text": None, "mm_payload": "tensors",
    },
}  # fmt: skip


def test_the_body_of_a_real_client_is_answered(app: App) -> None:
    for client, body in BODIES.items():
        answer = app.chat(**body)
        assert answer.status_code == 200, (client, answer.text)


def test_each_event_has_the_counts_so_far_where_they_are_asked_for(app: App) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = app.chat(max_tokens=12, temperature=0, stream=True, stream_options=options)
    *events, last = [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n")[:-2]]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[0] == 0 and counts[-1] == 12 and counts == sorted(counts) and len(set(counts)) > 5
    assert last["choices"] == [] and last["usage"] == events[-1]["usage"]
    assert {event["usage"]["prompt_tokens"] for event in events} == {last["usage"]["prompt_tokens"]}
    alone = app.chat(max_tokens=2, stream=True, stream_options={"continuous_usage_stats": True})
    assert '"usage"' not in alone.text  # as for vLLM


def test_token_ids_of_a_chat_are_told_whole_and_in_pieces(app: App) -> None:
    options: dict[str, Any] = {"messages": CHAT, "max_tokens": 9, "n": 2, "extra_body": {"return_token_ids": True}}
    whole, (first, *events) = (app.create("chat", stream=stream, **options) for stream in (False, True))
    assert whole.prompt_token_ids == first.prompt_token_ids and whole.prompt_token_ids
    assert not any(hasattr(event, "prompt_token_ids") for event in events)
    for index in (0, 1):
        mine = [event.choices[0] for event in events if event.choices[0].index == index]
        told = [token for choice in mine for token in getattr(choice, "token_ids", [])]
        assert told == whole.choices[index].token_ids and len(told) == 9
