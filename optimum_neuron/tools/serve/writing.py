# SPDX-License-Identifier: Apache-2.0
"""An answer in the form of its route: at once, or as a stream of its pieces."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from .answer import ServedAnswer
from .chat import ChatForm
from .choice import Piece
from .completions import CompletionForm
from .errors import ApiError
from .http import EventSender, to_json
from .protocol import Asked


Form = ChatForm | CompletionForm


class AnswerWriter:
    """The writer of one answer.

    Args:
        head: members that the answer, or each event of its stream, begins with.
    """

    def __init__(self, form: Form, asked: Asked, answer: ServedAnswer, head: dict[str, Any]) -> None:
        self._form, self._asked, self._answer = form, asked, answer
        self._head = {**head, "created": int(time.time())}
        # Token ids of each choice's prompt, where the answer has token ids.
        self._prompts = [answer.prompt_ids(index) if asked.return_token_ids else None for index in range(len(answer))]

    async def write_whole(self, pieces: AsyncIterator[tuple[int, Piece]]) -> dict[str, Any]:
        """Return the answer, once all of it is there."""
        each: list[list[Piece]] = [[] for _ in self._prompts]
        async for index, piece in pieces:
            each[index].append(piece)
        choices = [
            self._form.whole_choice(index, _join_pieces(mine), self._asked.logprobs, prompt)
            for index, (mine, prompt) in enumerate(zip(each, self._prompts, strict=True))
        ]
        head = {**self._head, "object": self._form.whole_object, **self._top_members()}
        return {**head, "choices": choices, "usage": self._answer.usage}

    async def write_stream(
        self, pieces: AsyncIterator[tuple[int, Piece]], sender: EventSender, refused: Callable[[int], None]
    ) -> None:
        """Send the pieces as they come; an error after the first of them is an event.

        Raises:
            ApiError: before the first piece.
        """
        self._head["object"] = self._form.piece_object
        try:
            async for index, piece in pieces:
                if not sender.started:
                    for number in range(len(self._prompts)):
                        await self._send_events(sender, self._form.begin_choices(number), 0)
                choices = self._form.piece_choices(index, piece, self._asked.logprobs, self._prompts[index])
                await self._send_events(sender, choices, piece.tokens)
            if self._asked.include_usage:
                await sender.send_event(to_json({**self._head, "choices": [], "usage": self._answer.usage}))
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
                event["usage"] = self._answer.usage_after(tokens) if self._asked.continuous_usage else None
            await sender.send_event(to_json(event))

    def _top_members(self) -> dict[str, Any]:
        prompt = self._prompts[0]
        return {} if prompt is None else self._form.top_members(prompt)


def _join_pieces(pieces: list[Piece]) -> Piece:
    """Return one piece of all that a choice had."""
    return pieces[-1]._replace(
        text="".join(piece.text for piece in pieces),
        scored=tuple(token for piece in pieces for token in piece.scored),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
    )
