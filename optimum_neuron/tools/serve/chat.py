# SPDX-License-Identifier: Apache-2.0
"""The route /v1/chat/completions: its body, and the forms of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .choice import Piece, ScoredToken
from .errors import ApiError
from .fields import Fields, wrong_value
from .loaded_model import LoadedModel
from .messages import read_messages
from .protocol import LARGEST, MOST_TOP_LOGPROBS, Asked, Conversation, check_model, read_common
from .token_texts import TokenTexts, finite_logprob


def read_chat(data: Mapping[str, Any], served: LoadedModel) -> Asked:
    """Read a chat's body; raise ApiError where it is wrong, or this server cannot do it."""
    fields = Fields(data)
    check_model(fields, served)
    conversation = _read_conversation(fields)
    old, new = (fields.take_whole(name, 1, LARGEST) for name in ("max_tokens", "max_completion_tokens"))
    if old is not None and new is not None and old != new:
        raise ApiError(
            f"max_tokens={old} and max_completion_tokens={new} differ; give one of them", param="max_completion_tokens"
        )
    limit = "max_completion_tokens" if old is None else "max_tokens"
    wanted, top = fields.take_flag("logprobs"), fields.take_whole("top_logprobs", 0, MOST_TOP_LOGPROBS)
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


def _read_conversation(fields: Fields) -> Conversation:
    """Read the messages and the values for the chat template.

    As vLLM 0.32 has it (entrypoints/openai/chat_completion/protocol.py), `reasoning_effort` decides `enable_thinking` too,
    unless the request does.
    """
    messages, characters = read_messages(fields.take_any("messages"))
    continues = fields.take_flag("continue_final_message")
    begins = fields.take_flag("add_generation_prompt", not continues)
    if continues and begins:
        raise ApiError(
            "add_generation_prompt=true and continue_final_message=true contradict each other; give one of them",
            param="continue_final_message",
        )
    options = fields.take_any("chat_template_kwargs")
    if options is None:
        options = {}
    if not isinstance(options, Mapping):
        raise wrong_value("chat_template_kwargs", options, "an object")
    effort = fields.take_text("reasoning_effort")
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

    def top_members(self, prompt: list[int]) -> dict[str, Any]:
        """Return members of an answer with token ids, or of its stream's first event: all choices have one prompt."""
        return {"prompt_token_ids": prompt}

    def begin_choices(self, index: int) -> list[dict[str, Any]]:
        """Return choices of the events before the first piece: the role."""
        return [_delta_choice(index, {"role": "assistant", "content": ""})]

    def piece_choices(
        self, index: int, piece: Piece, logprobs: int | None, prompt: list[int] | None
    ) -> list[dict[str, Any]]:
        """Return choices of the events of a piece, one each; with a prompt, the first has token ids."""
        events = []
        if piece.text or piece.scored:
            events.append(_delta_choice(index, {"content": piece.text}, self._logprobs_json(piece.scored, logprobs)))
        if piece.finish_reason is not None:
            events.append(
                _delta_choice(index, {}) | {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
            )
        if prompt is not None:
            events[0]["token_ids"] = piece.token_ids
        return events

    def whole_choice(self, index: int, piece: Piece, logprobs: int | None, prompt: list[int] | None) -> dict[str, Any]:
        """Return a choice that is sent at once."""
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs_json(piece.scored, logprobs),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        return choice | ({"token_ids": piece.token_ids} if prompt is not None else {})

    def _logprobs_json(self, scored: tuple[ScoredToken, ...], count: int | None) -> dict[str, Any] | None:
        if count is None:
            return None
        content = [
            self._token_json(each.token_id, each.logprob)
            | {"top_logprobs": [self._token_json(token, logprob) for token, logprob in each.top]}
            for each in scored
        ]
        return {"content": content, "refusal": None}

    def _token_json(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._texts.token_text(token_id),
            "logprob": finite_logprob(logprob),
            "bytes": self._texts.token_bytes(token_id),
        }


def _delta_choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
