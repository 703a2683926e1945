# SPDX-License-Identifier: Apache-2.0
"""Members of a JSON object, read with types and ranges, and the messages of a chat. null is the same as a missing member."""

from __future__ import annotations

import json
from collections.abc import Mapping
from reprlib import Repr
from typing import Any

from .http import ApiError


_SHOWN = Repr()
_SHOWN.maxstring, _SHOWN.maxlist, _SHOWN.maxdict = 60, 4, 3
# Members of a message that are texts, and their names in a template: servers have used several for one thing.
_TEXTS: dict[str, tuple[str, ...]] = {
    "role": ("role",), "name": ("name",), "tool_call_id": ("tool_call_id",),
    "reasoning_content": ("reasoning_content", "reasoning"), "reasoning": ("reasoning_content", "reasoning"),
}  # fmt: skip


def shown_value(value: object) -> str:
    """Return a value for a message, cut where it is long."""
    return _SHOWN.repr(value)


class Fields:
    """The members of an object; `rest` has those that were not read. Methods raise ApiError where a member is not as they say."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.rest = {name: value for name, value in data.items() if value is not None}

    def take_any(self, name: str) -> Any:
        return self.rest.pop(name, None)

    def take_whole(self, name: str, least: int, most: int) -> int | None:
        """Take a whole number; 3.0 is one in JSON."""
        value = self.take_any(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most):
            raise wrong_value(name, value, f"a whole number from {least} to {most}")
        return value

    def take_number(self, name: str, least: float, most: float) -> float | None:
        value = self.take_any(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise wrong_value(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def take_flag(self, name: str, default: bool = False) -> bool:
        """Take true or false; `default` where it is missing."""
        value = self.rest.pop(name, default)
        if not isinstance(value, bool):
            raise wrong_value(name, value, "true or false")
        return value

    def take_text(self, name: str) -> str | None:
        """Take a string that can be written as UTF-8."""
        value = self.take_any(name)
        return None if value is None else check_text(name, value)

    def take_texts(self, name: str, most: int, longest: int) -> tuple[str, ...] | None:
        """Take a string or a list of them, none of them empty; None where it is missing."""
        value = self.take_any(name)
        if value is None:
            return None
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or len(values) > most or not all(isinstance(each, str) for each in values):
            raise wrong_value(name, value, f"a string or a list of up to {most} strings")
        for each in values:
            if not 1 <= len(check_text(name, each)) <= longest:
                raise wrong_value(name, each, f"strings of 1 to {longest} characters")
        return tuple(values)


def wrong_value(name: str, value: object, wanted: str) -> ApiError:
    return ApiError(f"{name} is {shown_value(value)}; give {wanted}, or leave it out", param=name)


def check_text(name: str, value: object) -> str:
    """Return a string; raise ApiError where it is none, or has half of a surrogate pair, which no tokenizer takes."""
    if not isinstance(value, str):
        raise ApiError(f"{name} is {shown_value(value)}; give a string", param=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        at = f"{name} has half of a surrogate pair at character {error.start}"
        raise ApiError(f"{at}; send characters beyond U+FFFF whole", param=name) from None
    return value


def check_token_id(name: str, value: object, size: int) -> int:
    """Return a token id; raise ApiError where it is no whole number from 0 to `size - 1`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
        raise ApiError(
            f"{name} has the token id {shown_value(value)}, and the model's are 0 to {size - 1}; take ids from its own tokenizer",
            param=name,
        )
    return value


def read_messages(value: Any) -> tuple[list[dict[str, Any]], int]:
    """Return messages as a chat template takes them, and the characters of their texts; raise ApiError where one is wrong."""
    if not isinstance(value, list) or not value:
        raise ApiError(f"messages is {shown_value(value)}; give a list of at least one message", param="messages")
    messages = [_read_message(each, f"messages[{number}]") for number, each in enumerate(value)]
    # What a template may write of them; calls are measured after that.
    return messages, sum(len(each["content"]) + len(each.get("reasoning", "")) for each in messages)


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
        calls, where = left.pop("tool_calls"), f"{place}.tool_calls"
        if not isinstance(calls, list):
            raise _wrong_member(where, calls, "a list of calls")
        message["tool_calls"] = [_read_call(each, where) for each in calls]
    # An answer with calls or reasoning may have no text.
    nothing = "" if is_answer and ("tool_calls" in message or "reasoning" in message) else None
    content = left.pop("content", nothing)
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _wrong_member(f"{place}.content", part, "a string, or parts of type 'text'")
    message["content"] = "\n".join(check_text(f"{place}.content", part["text"]) for part in parts)
    for name in left:
        if name not in _TEXTS:
            raise ApiError(f"{place}.{name[:60]} is not supported; send text alone", param="messages")
    return message


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


def _wrong_member(place: str, value: object, wanted: str) -> ApiError:
    return ApiError(f"{place} has {shown_value(value)}; give {wanted}", param="messages")
