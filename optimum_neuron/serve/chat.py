# SPDX-License-Identifier: Apache-2.0
"""The route /v1/chat/completions: its body, and the forms of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .choice import Piece, ToldToken
from .errors import ApiError
from .fields import Fields, check_text, shown
from .protocol import MOST_TOP_LOGPROBS, Asked, Conversation, Sizes, check_model, read_common, read_limit
from .token_texts import TokenTexts, finite


def read_chat(data: Mapping[str, Any], sizes: Sizes) -> Asked:
    """What a chat's body asks.

    Raises:
        ApiError: it is wrong, or this server cannot do it.
    """
    fields = Fields(data)
    check_model(fields, sizes)
    messages = _messages(fields.any("messages"))
    old, new = read_limit(fields, "max_tokens"), read_limit(fields, "max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise ApiError(
            f"max_tokens={old} and max_completion_tokens={new} differ; give one of them", param="max_completion_tokens"
        )
    limit = "max_completion_tokens" if old is None else "max_tokens"
    wanted, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, MOST_TOP_LOGPROBS)
    if top and not wanted:
        raise ApiError(f"top_logprobs={top} has no meaning without logprobs=true; give both", param="top_logprobs")
    return read_common(
        fields,
        sizes,
        prompts=[Conversation(messages)],
        max_tokens=new if old is None else old,
        limit=limit,
        logprobs=(top or 0) if wanted else None,
    )


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ApiError(f"messages is {shown(value)}; give a list of at least one message", param="messages")
    return [_message(each, f"messages[{number}]") for number, each in enumerate(value)]


def _message(value: Any, place: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ApiError(f"{place} is {shown(value)}; give an object with role and content", param="messages")
    # What an answer is sent back with that has nothing of these.
    left = {name: each for name, each in value.items() if each not in (None, [])}
    message = {name: check_text(f"{place}.{name}", left.pop(name)) for name in ("role", "name") if name in left}
    if "role" not in message:
        raise ApiError(f"{place} has no role; give system, user or assistant", param="messages")
    message["content"] = _content(left.pop("content", None), place)
    for name in left:
        raise ApiError(f"{place}.{name} is not supported; send text alone", param="messages")
    return message


def _content(value: Any, place: str) -> str:
    """A text, or text parts, which become lines."""
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(
                f"{place}.content has {shown(part)}; give a string, or parts of type 'text'", param="messages"
            )
    return "\n".join(check_text(f"{place}.content", part["text"]) for part in parts)


class ChatForm:
    """Answers to chats, in OpenAI's form."""

    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def begin(self, index: int) -> list[dict[str, Any]]:
        """Choices of the events before the first piece: who speaks."""
        return [_delta(index, {"role": "assistant", "content": ""})]

    def piece(self, index: int, piece: Piece, logprobs: int | None) -> list[dict[str, Any]]:
        """Choices of the events that bring a piece, one each."""
        events = []
        if piece.text or piece.told:
            events.append(_delta(index, {"content": piece.text}, self._logprobs(piece.told, logprobs)))
        if piece.finish_reason is not None:
            events.append(_delta(index, {}) | {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason})
        return events

    def whole(self, index: int, piece: Piece, logprobs: int | None) -> dict[str, Any]:
        """A choice that is sent at once."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece.told, logprobs),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def _logprobs(self, told: tuple[ToldToken, ...], count: int | None) -> dict[str, Any] | None:
        if count is None:
            return None
        content = [
            self._token(each.token_id, each.logprob)
            | {"top_logprobs": [self._token(token, logprob) for token, logprob in each.top]}
            for each in told
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._texts.text(token_id),
            "logprob": finite(logprob),
            "bytes": self._texts.bytes(token_id),
        }


def _delta(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
