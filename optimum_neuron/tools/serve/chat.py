# SPDX-License-Identifier: Apache-2.0
"""The route /v1/chat/completions: its body, and the forms of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .choice import Piece, ToldToken
from .errors import ApiError
from .fields import Fields, wrong
from .messages import read_messages
from .protocol import LARGEST, MOST_TOP_LOGPROBS, Asked, Conversation, check_model, read_common
from .served_model import ServedModel
from .token_texts import TokenTexts, finite


def read_chat(data: Mapping[str, Any], served: ServedModel) -> Asked:
    """What a chat's body asks.

    Raises:
        ApiError: it is wrong, or this server cannot do it.
    """
    fields = Fields(data)
    check_model(fields, served)
    conversation = _conversation(fields)
    old, new = (fields.whole(name, 1, LARGEST) for name in ("max_tokens", "max_completion_tokens"))
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
        served,
        prompts=[conversation],
        max_tokens=new if old is None else old,
        limit=limit,
        logprobs=(top or 0) if wanted else None,
        special_tokens=False,  # the template writes them
    )


def _conversation(fields: Fields) -> Conversation:
    """Read the messages and the values for the chat template.

    As vLLM 0.32 has it (entrypoints/openai/chat_completion/protocol.py), `reasoning_effort` decides `enable_thinking` too,
    unless the request does.
    """
    messages, characters = read_messages(fields.any("messages"))
    continues = fields.flag("continue_final_message")
    begins = fields.flag("add_generation_prompt", not continues)
    if continues and begins:
        raise ApiError(
            "add_generation_prompt=true and continue_final_message=true contradict each other; give one of them",
            param="continue_final_message",
        )
    options = fields.any("chat_template_kwargs")
    if options is None:
        options = {}
    if not isinstance(options, Mapping):
        raise wrong("chat_template_kwargs", options, "an object")
    effort = fields.text("reasoning_effort")
    if effort is not None and options.get("reasoning_effort", effort) != effort:
        raise ApiError(
            f"reasoning_effort={effort!r} and that of chat_template_kwargs differ; give one of them",
            param="reasoning_effort",
        )
    if effort is not None:
        options = {"enable_thinking": effort != "none", **options, "reasoning_effort": effort}
    return Conversation(messages, characters, begins, continues, options)


class ChatForm:
    """Answers to chats, in OpenAI's form."""

    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def top(self, prompt: list[int]) -> dict[str, Any]:
        """Return members of an answer with token ids, or of its stream's first event: all choices have one prompt."""
        return {"prompt_token_ids": prompt}

    def begin(self, index: int) -> list[dict[str, Any]]:
        """Choices of the events before the first piece: who speaks."""
        return [_delta(index, {"role": "assistant", "content": ""})]

    def piece(self, index: int, piece: Piece, logprobs: int | None, prompt: list[int] | None) -> list[dict[str, Any]]:
        """Choices of the events that bring a piece, one each; where a prompt is given, the first has token ids."""
        events = []
        if piece.text or piece.told:
            events.append(_delta(index, {"content": piece.text}, self._logprobs(piece.told, logprobs)))
        if piece.finish_reason is not None:
            events.append(_delta(index, {}) | {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason})
        if prompt is not None:
            events[0]["token_ids"] = piece.token_ids
        return events

    def whole(self, index: int, piece: Piece, logprobs: int | None, prompt: list[int] | None) -> dict[str, Any]:
        """A choice that is sent at once."""
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece.told, logprobs),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        return choice | ({"token_ids": piece.token_ids} if prompt is not None else {})

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
        return {"token": self._texts.text(token_id), "logprob": finite(logprob), "bytes": self._texts.bytes(token_id)}


def _delta(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
