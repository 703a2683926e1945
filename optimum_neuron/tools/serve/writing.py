# SPDX-License-Identifier: Apache-2.0
"""An answer in OpenAI's form of its route: at once, or as a stream of its pieces."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from ...text.stream import TokenTexts
from .answer import Piece, ScoredToken, ServedAnswer
from .http import ApiError, EventSender, to_json
from .protocol import Asked


class CompletionForm:
    """Answers to completions, in OpenAI's form: each choice has a prompt."""

    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def top_members(self, prompt: list[int]) -> dict[str, Any]:
        return {}

    def begin_choices(self, index: int) -> list[dict[str, Any]]:
        return []

    def piece_choices(
        self, index: int, piece: Piece, logprobs: int | None, prompt: list[int] | None
    ) -> list[dict[str, Any]]:
        """Return choices of the events of a piece, one each; with a prompt, they have token ids."""
        return [self.whole_choice(index, piece, logprobs, prompt)]

    def whole_choice(self, index: int, piece: Piece, logprobs: int | None, prompt: list[int] | None) -> dict[str, Any]:
        choice = {
            "index": index,
            **self._text_members(piece.text),
            "logprobs": None if logprobs is None else self._logprobs_json(piece.scored),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        return choice if prompt is None else choice | self._token_members(piece, prompt)

    def _text_members(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _token_members(self, piece: Piece, prompt: list[int]) -> dict[str, Any]:
        return {"token_ids": piece.token_ids, "prompt_token_ids": prompt if piece.is_first else None}

    def _logprobs_json(self, scored: tuple[ScoredToken, ...]) -> dict[str, Any]:
        name = self._texts.token_text
        return {
            "tokens": [name(each.token_id) for each in scored],
            "token_logprobs": [_finite_logprob(each.logprob) for each in scored],
            # The chosen token is always among them, as OpenAI has it.
            "top_logprobs": [
                {name(token): _finite_logprob(value) for token, value in (*each.top, (each.token_id, each.logprob))}
                for each in scored
            ],
            "text_offset": [each.start for each in scored],
        }


class ChatForm(CompletionForm):
    """Answers to chats, in OpenAI's form: all choices have one prompt."""

    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def top_members(self, prompt: list[int]) -> dict[str, Any]:
        return {"prompt_token_ids": prompt}

    def begin_choices(self, index: int) -> list[dict[str, Any]]:
        return [_delta_choice(index, {"role": "assistant", "content": ""})]

    def piece_choices(
        self, index: int, piece: Piece, logprobs: int | None, prompt: list[int] | None
    ) -> list[dict[str, Any]]:
        events = []
        if piece.text or piece.scored:
            scores = None if logprobs is None else self._logprobs_json(piece.scored)
            events.append(_delta_choice(index, {"content": piece.text}, scores))
        if piece.finish_reason is not None:
            ending = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
            events.append(_delta_choice(index, {}) | ending)
        if prompt is not None:
            events[0]["token_ids"] = piece.token_ids
        return events

    def _text_members(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _token_members(self, piece: Piece, prompt: list[int]) -> dict[str, Any]:
        return {"token_ids": piece.token_ids}

    def _logprobs_json(self, scored: tuple[ScoredToken, ...]) -> dict[str, Any]:
        def describe_token(token_id: int, logprob: float) -> dict[str, Any]:
            text, known = self._texts.token_text(token_id), self._texts.token_bytes(token_id)
            return {"token": text, "logprob": _finite_logprob(logprob), "bytes": known}

        content = [
            describe_token(each.token_id, each.logprob)
            | {"top_logprobs": [describe_token(*other) for other in each.top]}
            for each in scored
        ]
        return {"content": content, "refusal": None}


class AnswerWriter:
    """The writer of one answer; it, or each event of its stream, begins with the members of `head`."""

    def __init__(self, form: CompletionForm, asked: Asked, answer: ServedAnswer, head: dict[str, Any]) -> None:
        self._form, self._asked, self._answer = form, asked, answer
        self._head = {**head, "created": int(time.time())}
        # Token ids of each choice's prompt, where the answer has token ids.
        self._prompts = [answer.prompt_ids(index) if asked.return_token_ids else None for index in range(len(answer))]

    async def write_whole(self, pieces: AsyncIterator[tuple[int, Piece]]) -> dict[str, Any]:
        each: list[list[Piece]] = [[] for _ in self._prompts]
        async for index, piece in pieces:
            each[index].append(piece)
        choices = []
        for index, (mine, prompt) in enumerate(zip(each, self._prompts, strict=True)):
            whole = mine[-1]._replace(
                text="".join(piece.text for piece in mine),
                scored=tuple(token for piece in mine for token in piece.scored),
                token_ids=tuple(token for piece in mine for token in piece.token_ids),
            )
            choices.append(self._form.whole_choice(index, whole, self._asked.logprobs, prompt))
        head = {**self._head, "object": self._form.whole_object, **self._top_members()}
        return {**head, "choices": choices, "usage": self._answer.count_usage()}

    async def write_stream(
        self, pieces: AsyncIterator[tuple[int, Piece]], sender: EventSender, refused: Callable[[int], None]
    ) -> None:
        """Send the pieces as they come. An ApiError before the first is raised, and a later one is an event."""
        self._head["object"] = self._form.piece_object
        try:
            async for index, piece in pieces:
                if not sender.started:
                    for number in range(len(self._prompts)):
                        await self._send_events(sender, self._form.begin_choices(number), 0)
                choices = self._form.piece_choices(index, piece, self._asked.logprobs, self._prompts[index])
                await self._send_events(sender, choices, piece.tokens)
            if self._asked.include_usage:
                await sender.send_event(to_json({**self._head, "choices": [], "usage": self._answer.count_usage()}))
        except ApiError as error:
            if not sender.started:
                raise
            refused(error.status)
            await sender.send_event(to_json(error.to_dict()))
        await sender.send_end()

    async def _send_events(self, sender: EventSender, choices: list[dict[str, Any]], tokens: int) -> None:
        """Send an event for each choice, which has so many tokens by then."""
        for choice in choices:
            event = {**self._head, "choices": [choice], **({} if sender.started else self._top_members())}
            if self._asked.include_usage:
                event["usage"] = self._answer.count_usage(tokens) if self._asked.continuous_usage else None
            await sender.send_event(to_json(event))

    def _top_members(self) -> dict[str, Any]:
        prompt = self._prompts[0]
        return {} if prompt is None else self._form.top_members(prompt)


def _delta_choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _finite_logprob(logprob: float) -> float:
    """Return a number for JSON, which has no infinity: OpenAI writes -9999 for a token without chance."""
    return max(logprob, -9999.0)
