# SPDX-License-Identifier: Apache-2.0
"""The messages of a chat, read for its template: texts, and calls of tools that earlier answers made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .errors import ApiError
from .fields import check_text, shown_value


# Members of a message that are texts, and their names in a template: servers have used several for one thing.
_TEXTS: dict[str, tuple[str, ...]] = {
    "role": ("role",), "name": ("name",), "tool_call_id": ("tool_call_id",),
    "reasoning_content": ("reasoning_content", "reasoning"), "reasoning": ("reasoning_content", "reasoning"),
}  # fmt: skip


def read_messages(value: Any) -> tuple[list[dict[str, Any]], int]:
    """Return messages as a chat template takes them, and the characters of their texts.

    Raises:
        ApiError: one of them is wrong, or has what this server cannot give to a model.
    """
    if not isinstance(value, list) or not value:
        raise ApiError(f"messages is {shown_value(value)}; give a list of at least one message", param="messages")
    messages = [_read_message(each, f"messages[{number}]") for number, each in enumerate(value)]
    return messages, sum(map(_count_characters, messages))


def _read_message(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ApiError(f"{place} is {shown_value(value)}; give an object with role and content", param="messages")
    # What an answer is sent back with that has nothing of these.
    left = {name: each for name, each in value.items() if each not in (None, [], {})}
    message: dict[str, Any] = {
        as_name: check_text(f"{place}.{name}", left[name])
        for name, names in _TEXTS.items()
        if name in left
        for as_name in names
    }
    if "role" not in message:
        raise ApiError(f"{place} has no role; give system, user or assistant", param="messages")
    is_answer = message["role"] == "assistant"
    if is_answer and "tool_calls" in left:
        message["tool_calls"] = _read_calls(left.pop("tool_calls"), f"{place}.tool_calls")
    # An answer with calls or reasoning may have no text.
    nothing = "" if is_answer and ("tool_calls" in message or "reasoning" in message) else None
    message["content"] = _read_content(left.pop("content", nothing), place)
    for name in left:
        if name not in _TEXTS:
            raise ApiError(f"{place}.{name[:60]} is not supported; send text alone", param="messages")
    return message


def _read_content(value: Any, place: str) -> str:
    """Return a text, or text parts as lines."""
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _wrong_member(f"{place}.content", part, "a string, or parts of type 'text'")
    return "\n".join(check_text(f"{place}.content", part["text"]) for part in parts)


def _read_calls(value: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _wrong_member(place, value, "a list of calls")
    return [_read_call(each, place) for each in value]


def _read_call(value: Any, place: str) -> dict[str, Any]:
    """Return a call of a function, with its arguments as an object: templates write them as JSON themselves."""
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong_member(place, value, "calls with function.name and function.arguments")
    given = function.get("arguments") or {}
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, Mapping):
        raise _wrong_member(f"{place} arguments", given, "a JSON object")
    name = check_text(f"{place} name", function["name"])
    return {**value, "type": "function", "function": {"name": name, "arguments": arguments}}


def _count_characters(message: Mapping[str, Any]) -> int:
    """Count the characters that a template may write of a message; calls are measured after that."""
    return len(message["content"]) + len(message.get("reasoning", ""))


def _wrong_member(place: str, value: object, wanted: str) -> ApiError:
    return ApiError(f"{place} has {shown_value(value)}; give {wanted}", param="messages")
